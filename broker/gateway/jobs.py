"""The jobs of all clients: from SUBMIT to the end of their retention.

Turns what clients ask into messages for text and ledger, and what those answer into the streams'
logs and the sender's messages. Knows clients and streams; knows no frames.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from broker.config import ZmqConfig
from broker.gateway.digest import digest_of
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client
from broker.gateway.stream import Stream, StreamState
from broker.messages import (
    Accepted,
    Address,
    Cancel,
    Done,
    Failed,
    Pause,
    Prepare,
    Prepared,
    PrepareFailed,
    Publish,
    Refused,
    Released,
    Submit,
    Tokens,
    Unpause,
)
from broker.text.detokenizer import Detokenizer
from broker.text.vocabulary import Vocabulary
from tokenbus.bodies import error_to_body
from tokenbus.errors import (
    Busy,
    Conflict,
    Draining,
    InvalidField,
    TokenbusError,
    UnknownJob,
    Unsupported,
)
from tokenbus.protocol import MessageType
from tokenbus.request import MAX_SEED, JobRequest

log = structlog.get_logger("broker.gateway")


@dataclass(frozen=True, slots=True)
class Wiring:
    """Whom the jobs' messages go to. door: this door, as text and ledger answer it."""

    door: Address
    text: Address
    ledger: Address


class Jobs:
    """has_keys: clients are known by CURVE keys, so tenants are walls and not just labels."""

    def __init__(
        self,
        config: ZmqConfig,
        vocabulary: Vocabulary,
        has_keys: bool,
        wiring: Wiring,
        sender: Sender,
    ) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._has_keys = has_keys
        self._wiring = wiring
        self._sender = sender
        self._streams: dict[str, Stream] = {}
        self._ended: deque[Stream] = deque()
        self.refused: Counter[str] = Counter()  # by error code
        self.dirty: set[Client] = set()  # clients whose streams have something new to flush
        self.handlers: dict[type, Callable[[Any], None]] = {
            Publish: self._on_publish,
            Prepared: self._on_prepared,
            PrepareFailed: self._on_prepare_failed,
            Accepted: self._on_accepted,
            Refused: self._on_refused,
            Released: self._on_released,
        }

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._streams) - len(self._ended)

    # ------------------------------------------------------------ from clients

    def submit(self, client: Client, request: JobRequest) -> None:
        """A new job, or the same once more. Raises what it is refused for."""
        request = self._with_tenant(request, client)
        if request.durable:
            raise Unsupported("durable: jobs of this door do not go through Redis", field="durable")
        digest = digest_of(request)
        known = self._streams.get(request.job)
        if known is not None:
            self._repeat(known, client, request, digest)
            return
        stream = Stream(request.job, client, request.tenant, digest)
        if request.deadline_ms is not None:
            stream.deadline_ns = time.monotonic_ns() + request.deadline_ms * 1_000_000
        if not self._wiring.text.tell(Prepare(request, self._wiring.door, stream)):
            raise Busy("too many prompts are being prepared", retry_ms=500)
        self._streams[request.job] = stream
        client.streams[request.job] = stream

    def cancel(self, client: Client, job: str) -> None:
        """End a job; an ended one is told again. Raises UnknownJob."""
        stream = self.find(client, job)
        if stream.state is StreamState.ENDED:
            stream.terminal_sent = False
            self._attach(stream, client)
        elif stream.state is StreamState.PREPARING:
            stream.is_cancelled = True
        else:
            self._wiring.ledger.tell(Cancel(job))

    def resume(self, client: Client, job: str, after: int) -> None:
        """Send from seq after + 1 to this client. Raises UnknownJob, Gone."""
        stream = self.find(client, job)
        stream.rewind(after)
        self._attach(stream, client)

    def find(self, client: Client, job: str) -> Stream:
        """The job, if this client may know of it. Raises UnknownJob."""
        stream = self._streams.get(job)
        if stream is None or (
            self._has_keys and stream.client is not client and stream.tenant != client.tenant
        ):
            raise UnknownJob(f"job: nobody knows {job!r} here", field="job")
        return stream

    def abandon(self, client: Client) -> None:
        """The client is gone: cancel what it has not got."""
        for stream in client.streams.values():
            stream.is_attached = False
            if stream.state is StreamState.PREPARING:
                stream.is_cancelled = True
            elif stream.state is StreamState.LIVE:
                self._wiring.ledger.tell(Cancel(stream.job))
        client.waiting.clear()

    def forget_old(self) -> None:
        """Drop ended jobs beyond their retention."""
        keep_from_s = time.monotonic() - self._config.retain_ms / 1000
        ended = self._ended
        while ended and (len(ended) > self._config.retain_jobs or ended[0].ended_s < keep_from_s):
            self._forget(ended.popleft())

    def on_backlog(self, stream: Stream, is_over: bool) -> None:
        """A slow client: its job waits, nobody else's."""
        stream.is_paused = is_over
        if stream.state is not StreamState.ENDED:
            self._wiring.ledger.tell(Pause(stream.job) if is_over else Unpause(stream.job))

    def _with_tenant(self, request: JobRequest, client: Client) -> JobRequest:
        if not request.tenant:
            return replace(request, tenant=client.tenant) if client.tenant else request
        if self._has_keys and client.tenant and request.tenant != client.tenant:
            raise InvalidField(f"tenant: this key is {client.tenant!r}'s", field="tenant")
        return request

    def _repeat(self, known: Stream, client: Client, request: JobRequest, digest: bytes) -> None:
        if known.digest != digest or known.tenant != request.tenant:
            raise Conflict(f"job: {request.job!r} is taken by a different request", field="job")
        self._attach(known, client)
        known.restart()
        if known.state is not StreamState.PREPARING:
            self._send_accepted(known, 0)

    def _attach(self, stream: Stream, client: Client) -> None:
        """This client's session gets the stream from now on."""
        old = stream.client
        if old is not client:
            old.streams.pop(stream.job, None)
            old.waiting.pop(stream.job, None)
            stream.client = client
            client.streams[stream.job] = stream
        stream.is_attached = True
        client.waiting[stream.job] = stream

    # ------------------------------------------------------------ from text and ledger

    def _on_prepared(self, message: Prepared) -> None:
        stream = message.context
        if not isinstance(stream, Stream) or self._streams.get(stream.job) is not stream:
            return
        request = message.request
        stops = request.params.stop
        stream.open(message, Detokenizer(self._vocabulary, stops, message.min_tokens))
        seed = request.params.seed
        stream.seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        submit = Submit(
            prepared=message,
            door=self._wiring.door,
            attempt=stream.attempt,
            seed=stream.seed,
            prefix_ids=request.have,
            deadline_ns=stream.deadline_ns,
        )
        self._wiring.ledger.tell(submit)

    def _on_prepare_failed(self, message: PrepareFailed) -> None:
        stream = message.context
        if isinstance(stream, Stream) and self._streams.get(stream.job) is stream:
            self._reject(stream, message.error)

    def _on_refused(self, message: Refused) -> None:
        stream = self._streams.get(message.job)
        if stream is not None:
            self._reject(stream, message.error)

    def _reject(self, stream: Stream, error: TokenbusError) -> None:
        """The job was not taken; its id is free again."""
        self._forget(stream)
        self.refused[error.code] += 1
        log.info("job.rejected", job=stream.job, code=error.code, field=error.field)
        peer = stream.client.peer
        if peer is not None:
            body = error_to_body(error, job=stream.job)
            self._sender.answer(peer, MessageType.REJECTED, body)

    def _on_accepted(self, message: Accepted) -> None:
        stream = self._streams.get(message.job)
        if stream is None:
            return
        stream.state = StreamState.LIVE
        self._send_accepted(stream, message.queue_position)
        if stream.is_cancelled:
            self._wiring.ledger.tell(Cancel(stream.job))

    def _send_accepted(self, stream: Stream, position: int) -> None:
        peer = stream.client.peer
        if peer is None:
            return
        body = {
            "job": stream.job,
            "attempt": stream.attempt,
            "seed": stream.seed,
            "prompt_tokens": stream.prompt_tokens,
            "seq": stream.last_seq,
            "queue_position": position,
        }
        self._sender.answer(peer, MessageType.ACCEPTED, body)

    def _on_publish(self, message: Publish) -> None:
        streams, sender = self._streams, self._sender
        for event in message.events:
            stream = streams.get(event.job)
            if stream is None:
                continue
            if isinstance(event, Tokens):
                sender.add(stream, event)
            else:
                self._end(stream, event)

    def _end(self, stream: Stream, event: Done | Failed) -> None:
        stream.end(event)
        self._ended.append(stream)
        stream.client.waiting[stream.job] = stream
        self.dirty.add(stream.client)

    def _on_released(self, message: Released) -> None:
        """The worker drains: another one may run these jobs."""
        for job in message.jobs:
            stream = self._streams.get(job)
            if stream is not None:
                error = Draining("the worker stops; submit again elsewhere", retry_ms=1_000)
                self._end(stream, Failed(job, stream.attempt, stream.last_seq, error))

    def _forget(self, stream: Stream) -> None:
        if self._streams.get(stream.job) is stream:
            del self._streams[stream.job]
        stream.client.streams.pop(stream.job, None)
        stream.client.waiting.pop(stream.job, None)


def job_stats(stream: Stream) -> dict[str, object]:
    """Body of a STATS answer about one job."""
    body: dict[str, object] = {
        "job": stream.job,
        "state": "running" if stream.last_seq else "queued",
        "attempt": stream.attempt,
        "seq": stream.last_seq,
        "prompt_tokens": stream.prompt_tokens,
    }
    event = stream.terminal
    if isinstance(event, Failed):
        body.update(state="failed", code=event.error.code)
    elif event is not None:
        body.update(state="done", reason=event.reason)
    return body
