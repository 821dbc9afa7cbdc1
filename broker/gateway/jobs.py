"""The jobs of all clients: from SUBMIT to the end of their retention.

Turns what clients ask into messages for text and ledger, and what those answer into the streams'
logs and the sender's messages. Knows clients and streams; knows no frames.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from broker.gateway.answers import accepted_body, job_stats, unknown
from broker.gateway.digest import digest_of
from broker.gateway.durable import DurableJobs
from broker.gateway.relayed import RelayedStream, is_by_name
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, with_tenant
from broker.gateway.shared import Wiring, accept_all, check_backlog, heir_of, reject_all, tell_end
from broker.gateway.stream import Stream, StreamState
from broker.gateway.table import StreamTable
from broker.messages import (
    AboutJob,
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
from tokenbus.errors import Busy, Conflict, Draining, TokenbusError, Unsupported
from tokenbus.protocol import MessageType
from tokenbus.request import JobRequest

SEED_BITS = 53  # what every language's numbers hold exactly

log = structlog.get_logger("broker.gateway")


class Jobs:
    """relay: the Redis door, where there is one."""

    def __init__(
        self, table: StreamTable, vocabulary: Vocabulary, wiring: Wiring, sender: Sender
    ) -> None:
        self._vocabulary = vocabulary
        self._table = table
        self._wiring = wiring
        self._sender = sender
        self._durable: DurableJobs | None = None
        self._seeds = random.Random()
        self._is_draining = False
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

    def connect_relay(self, relay: Address) -> None:
        """Durable jobs go there."""
        durable = DurableJobs(self._table, self._sender, self._wiring.door, relay)
        durable.on_reject = self._reject
        durable.on_change = self._touch
        self.handlers.update(durable.handlers)
        self._durable = durable

    def drain(self) -> None:
        """No new durable jobs; the ledger speaks for the others."""
        self._is_draining = True

    # ------------------------------------------------------------ from clients

    def submit(self, client: Client, request: JobRequest) -> None:
        """A new job, or the same once more. Raises what it is refused for."""
        request = with_tenant(request, client, self._table.has_keys)
        known = self._table.get(request.job)
        if known is not None and not (request.durable and is_by_name(known)):
            self._repeat(known, client, request)
            return
        check_backlog(client)
        if request.durable:
            self._submit_durable(client, request)
            return
        if request.idempotency_key is not None:
            raise Unsupported("idempotency_key: only with durable", field="idempotency_key")
        stream = Stream(request.job, client, request, request.tenant, self._wiring.ledger)
        if request.deadline_ms is not None:
            stream.deadline_ns = time.monotonic_ns() + request.deadline_ms * 1_000_000
        if not self._wiring.text.tell(Prepare(request, self._wiring.door, stream)):
            raise Busy("too many prompts are being prepared", retry_ms=500)
        self._table.add(stream)

    def cancel(self, client: Client, job: str) -> None:
        """End a job; an ended one is told again. Raises UnknownJob."""
        stream = self._table.visible(client, job)
        if stream is None:
            self._look_up(client, job, MessageType.CANCEL)
            return
        if stream.state is StreamState.ENDED:
            self._attach(stream, client)
            stream.terminal_sent = False
            return
        if stream.client is client and isinstance(stream, RelayedStream):
            self._relayed().listen(stream)
        elif stream.client is not client or not stream.is_attached:
            stream.others[client] = None  # to hear the end
        if stream.state is StreamState.PREPARING and not isinstance(stream, RelayedStream):
            stream.is_cancelled = True
        else:
            self._tell_owner(Cancel, stream)

    def resume(self, client: Client, job: str, after: int) -> None:
        """Send from seq after + 1 to this client. Raises UnknownJob, Gone."""
        stream = self._table.visible(client, job)
        if stream is None:
            self._look_up(client, job, MessageType.RESUME, after)
        elif isinstance(stream, RelayedStream):
            self._relayed().rewind(stream, client, after)
        else:
            stream.check(after)
            self._attach(stream, client)
            stream.rewind(after)

    def stats(self, client: Client, job: str) -> dict[str, object] | None:
        """What is known of a job; None: Redis is asked, and the answer goes to the client.
        Raises UnknownJob.
        """
        stream = self._table.visible(client, job)
        if stream is not None:
            return job_stats(stream)
        self._look_up(client, job, MessageType.STATS)
        return None

    def abandon(self, client: Client) -> None:
        """The client is gone: cancel what it has not got, but for durable jobs, and jobs that
        somebody else has asked for.
        """
        for stream in list(client.streams.values()):
            stream.is_attached = False
            if stream.state is StreamState.ENDED:
                continue
            heir = None if stream.is_cancelled else heir_of(stream)
            if isinstance(stream, RelayedStream):
                self._relayed().abandon(stream)
            elif heir is not None:
                self._table.pass_on(stream, heir)
                stream.restart()
                self._touch(heir)
            elif stream.state is StreamState.PREPARING:
                stream.is_cancelled = True
            else:
                self._tell_owner(Cancel, stream)
        client.waiting.clear()

    def on_backlog(self, stream: Stream, is_over: bool) -> None:
        """A slow client: its job waits, nobody else's."""
        stream.is_paused = is_over
        if stream.state is not StreamState.ENDED:
            self._tell_owner(Pause if is_over else Unpause, stream)

    def _tell_owner(self, kind: type[AboutJob], stream: Stream) -> None:
        """The ledger may have a job of another door under this id by now."""
        stream.owner.tell(kind(stream.job, door=self._wiring.door))

    def _submit_durable(self, client: Client, request: JobRequest) -> None:
        if self._durable is None:
            raise Unsupported("durable: this worker has no Redis", field="durable")
        if self._is_draining:
            raise Draining("the worker is draining", retry_ms=1_000)
        self._durable.submit(client, request)

    def _look_up(self, client: Client, job: str, kind: MessageType, after: int = 0) -> None:
        """Only Redis can know the job."""
        if self._durable is None or self._table.get(job) is not None:
            raise unknown(job)
        self._durable.look_up(client, job, kind, after)

    def _relayed(self) -> DurableJobs:
        if self._durable is None:
            raise RuntimeError("a durable job without a relay")
        return self._durable

    def _repeat(self, known: Stream, client: Client, request: JobRequest) -> None:
        if known.digest != digest_of(request) or known.tenant != request.tenant:
            raise Conflict(f"job: {request.job!r} is taken by a different request", field="job")
        if isinstance(known, RelayedStream):
            self._relayed().rewind(known, client, 0)
        else:
            self._attach(known, client)
            known.restart()
        peer = client.peer
        if known.state is not StreamState.PREPARING and peer is not None:
            self._sender.answer(peer, MessageType.ACCEPTED, accepted_body(known, 0))

    def _attach(self, stream: Stream, client: Client) -> None:
        """Who has it next; if the job has ended, whoever has not heard it hears it now."""
        self._table.attach(stream, client)
        tell_end(self._sender, stream)

    # ------------------------------------------------------------ from text and ledger

    def _on_prepared(self, message: Prepared) -> None:
        stream = message.context
        if not isinstance(stream, Stream) or not self._table.is_current(stream):
            return
        request = message.request
        stops = request.params.stop
        stream.open(message, Detokenizer(self._vocabulary, stops, message.min_tokens))
        seed = request.params.seed
        stream.seed = self._seeds.getrandbits(SEED_BITS) if seed is None else seed
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
        if isinstance(stream, Stream) and self._table.is_current(stream):
            self._reject(stream, message.error)

    def _on_refused(self, message: Refused) -> None:
        stream = self._table.get(message.job)
        if stream is not None and stream.awaits(message.attempt):
            self._reject(stream, message.error)

    def _reject(self, stream: Stream, error: TokenbusError) -> None:
        """The job was not taken; its id is free again."""
        self._table.forget(stream)
        self.refused[error.code] += 1
        log.info("job.rejected", job=stream.job, code=error.code, field=error.field)
        reject_all(self._sender, stream, error)

    def _on_accepted(self, message: Accepted) -> None:
        stream = self._table.get(message.job)
        if stream is None or not stream.awaits(message.attempt):
            return
        if isinstance(stream, RelayedStream):
            self._relayed().on_accepted(stream, message)
            return
        stream.state = StreamState.LIVE
        accept_all(self._sender, stream, message.queue_position)
        stream.seal()
        if stream.is_cancelled:
            self._tell_owner(Cancel, stream)

    def _on_publish(self, message: Publish) -> None:
        find, sender = self._table.get, self._sender
        for event in message.events:
            stream = find(event.job)
            if stream is None:
                continue
            if isinstance(stream, RelayedStream):
                self._relayed().on_event(stream, event)
            elif stream.state is StreamState.PREPARING:
                continue  # of a durable job that had the id before
            elif isinstance(event, Tokens):
                sender.add(stream, event)
            else:
                self._end(stream, event)

    def _end(self, stream: Stream, event: Done | Failed) -> None:
        self._table.end(stream, event)
        tell_end(self._sender, stream)
        self._touch(stream.client)

    def _touch(self, client: Client) -> None:
        self.dirty.add(client)

    def _on_released(self, message: Released) -> None:
        """The worker drains: another one may run these jobs."""
        for job, attempt in message.jobs:
            stream = self._table.get(job)
            if stream is not None and stream.attempt == attempt:
                error = Draining("the worker stops; submit again elsewhere", retry_ms=1_000)
                self._end(stream, Failed(job, stream.attempt, stream.last_seq, error))
