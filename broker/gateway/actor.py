"""The gateway actor: speaks the protocol with many clients over one ROUTER.

Every message is checked before anything else sees it, and answered with a typed error if it is bad;
nothing a peer sends can stop the loop. Jobs go to text, then to the ledger; what comes back is
logged per job (`Stream`) and sent as the client's credit allows (`Sender`).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from broker.actor import Actor, ActorSystem, Overflow
from broker.config import BrokerConfig, ZmqConfig
from broker.gateway.digest import digest_of
from broker.gateway.router import Router
from broker.gateway.security import Curve
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, Peer
from broker.gateway.stream import Stream, StreamState
from broker.messages import (
    Accepted,
    Address,
    Cancel,
    Capacity,
    Drain,
    EngineState,
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
from tokenbus.bodies import (
    Hello,
    Resume,
    Welcome,
    error_to_body,
    read_cancel,
    read_credit,
    read_ping,
    read_stats_question,
)
from tokenbus.errors import (
    BadFrame,
    Busy,
    Conflict,
    Draining,
    InvalidField,
    NoSession,
    TokenbusError,
    TooLarge,
    UnknownJob,
    Unsupported,
    VersionMismatch,
)
from tokenbus.parse import parse_submit
from tokenbus.protocol import MAJOR, Limits, Message, MessageType, decode
from tokenbus.request import MAX_SEED, JobRequest

log = structlog.get_logger("broker.gateway")

UNBLOCK_PERIOD_S = 0.005


class GatewayActor(Actor):
    """Mailbox policy CRASH: what the ledger says may not be lost, and its jobs are bounded."""

    def __init__(
        self,
        system: ActorSystem,
        config: BrokerConfig,
        vocabulary: Vocabulary,
        curve: Curve | None,
        text: Address,
        ledger: Address,
    ) -> None:
        super().__init__(system, "gateway", capacity=131_072, overflow=Overflow.CRASH)
        if config.zmq is None:
            raise ValueError("the configuration has no ZeroMQ door")
        self._config: ZmqConfig = config.zmq
        self._welcome = _welcome(config, self._config)
        self._limits = self._welcome.limits
        self._vocabulary = vocabulary
        self._tenants = curve.tenants if curve else None
        self._text = text
        self._ledger = ledger
        self._router = Router(system.loop, self._config, curve)
        self.endpoint = self._router.endpoint
        self._sender = Sender(self._router, self._config.log_tokens_per_job, self._on_backlog)
        self._peers: dict[bytes, Peer] = {}
        self._clients: dict[str, Client] = {}
        self._streams: dict[str, Stream] = {}
        self._ended: deque[Stream] = deque()
        self._state = EngineState(ready=False, progress=0)
        self._dirty: set[Client] = set()  # clients with something new to flush in this burst
        self._unblocks = False
        self._from_client: dict[MessageType, Callable[[Peer, Client, Message], None]] = {
            MessageType.SUBMIT: self._on_submit,
            MessageType.CANCEL: self._on_cancel,
            MessageType.RESUME: self._on_resume,
            MessageType.CREDIT: self._on_credit,
            MessageType.STATS: self._on_stats,
        }
        self._from_actors: dict[type, Callable[[Any], None]] = {
            Publish: self._on_publish,
            Prepared: self._on_prepared,
            PrepareFailed: self._on_prepare_failed,
            Accepted: self._on_accepted,
            Refused: self._on_refused,
            Released: self._on_released,
            EngineState: self._on_engine_state,
            Drain: self._on_drain,
            Capacity: lambda _: None,  # for doors that fetch jobs; clients bring theirs
        }

    def start(self) -> None:
        """Receive."""
        self._router.start(self._on_frames, self.guard)
        self.every(self._config.heartbeat_ms / 2000, self._sweep)

    async def stop(self) -> None:
        """Close the socket."""
        self._router.close()

    def handle(self, message: object) -> None:
        """What text and ledger say."""
        handler = self._from_actors.get(type(message))
        if handler is None:
            raise TypeError(f"the gateway takes no {type(message).__name__}")
        handler(message)

    def after_burst(self) -> None:
        """One message a client, then the ends."""
        self._sender.flush_batch()
        dirty, self._dirty = self._dirty, set()
        for client in dirty:
            self._sender.flush_client(client)
        if self._sender.blocked and not self._unblocks:
            self._unblocks = True
            self.later(UNBLOCK_PERIOD_S, self._unblock)

    # ------------------------------------------------------------ frames

    def _on_frames(self, routing_id: bytes, frames: list[bytes], key: bytes) -> None:
        now_s = self._loop.time()
        peer = self._peers.get(routing_id)
        if peer is None:
            peer = self._peers[routing_id] = Peer(routing_id, now_s)
        peer.last_heard_s = now_s
        if peer.client is not None:
            peer.client.last_heard_s = now_s
        if now_s < peer.muted_until_s:
            return
        try:
            message = decode(frames, self._limits)
        except (BadFrame, VersionMismatch, TooLarge, Unsupported) as error:
            self._on_bad_frame(peer, error, now_s)
            return
        try:
            self._dispatch(peer, message, key)
        except TokenbusError as error:
            self._refuse_message(peer, message, error)

    def _on_bad_frame(self, peer: Peer, error: TokenbusError, now_s: float) -> None:
        is_muted = peer.strike(now_s)
        log.warning("frame.bad", code=error.code, error=error.message[:200], muted=is_muted)
        self._sender.try_answer(peer, MessageType.ERROR, error_to_body(error))

    def _refuse_message(self, peer: Peer, message: Message, error: TokenbusError) -> None:
        """The message was in the protocol, but cannot be honoured."""
        job = message.body.get("job")
        where = {"job": job} if isinstance(job, str) and len(job) <= 128 else {}
        is_submit = message.type is MessageType.SUBMIT and "job" in where
        has_session = not isinstance(error, NoSession)
        kind = MessageType.REJECTED if is_submit and has_session else MessageType.ERROR
        if not has_session:
            where = {}
        self._sender.answer(peer, kind, error_to_body(error, **where))

    def _dispatch(self, peer: Peer, message: Message, key: bytes) -> None:
        kind = message.type
        if kind is MessageType.HELLO:
            self._on_hello(peer, message, key)
            return
        if kind is MessageType.PONG:
            return
        client = peer.client
        if client is None or client.peer is not peer:
            raise NoSession("say HELLO first: this connection has no session (any more)")
        if kind is MessageType.PING:
            self._sender.try_answer(peer, MessageType.PONG, {"t": read_ping(message.body)})
            return
        handler = self._from_client.get(kind)
        if handler is None:
            raise Unsupported(f"{kind.name} is not for a worker", field="type")
        handler(peer, client, message)
        if client.waiting:
            self._sender.flush_client(client)

    def _on_hello(self, peer: Peer, message: Message, key: bytes) -> None:
        hello = Hello.from_body(message.body)
        if MAJOR not in hello.versions:
            raise VersionMismatch(f"versions: offered here: [{MAJOR}]", field="versions")
        tenant = hello.tenant
        if self._tenants is not None:
            tenant = self._tenants.get(key, "") or tenant
        name = f"{key.decode()}/{hello.client}" if key else hello.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name)
        if client.peer is not None and client.peer is not peer:
            log.info("client.moved", client=hello.client)
            client.peer.client = None
        client.begin_session(peer, hello.credit, tenant, self._loop.time())
        log.info("client.hello", client=hello.client, tenant=tenant, agent=hello.agent)
        self._sender.answer(peer, MessageType.WELCOME, self._welcome.to_body())

    # ------------------------------------------------------------ from clients

    def _on_submit(self, peer: Peer, client: Client, message: Message) -> None:
        request = self._with_tenant(parse_submit(message.body, message.blobs), client)
        if request.durable:
            raise Unsupported("durable: this worker has no Redis door for it", field="durable")
        digest = digest_of(request)
        known = self._streams.get(request.job)
        if known is not None:
            if known.digest != digest or known.tenant != request.tenant:
                message_text = f"job: {request.job!r} is taken by a different request"
                raise Conflict(message_text, field="job")
            self._attach(known, client)
            known.restart()
            if known.state is not StreamState.PREPARING:
                self._send_accepted(known, 0)
            return
        stream = Stream(request.job, client, request.tenant, digest)
        if request.deadline_ms is not None:
            stream.deadline_ns = time.monotonic_ns() + request.deadline_ms * 1_000_000
        if not self._text.tell(Prepare(request, self, stream)):
            raise Busy("too many prompts are being prepared", retry_ms=500)
        self._streams[request.job] = stream
        client.streams[request.job] = stream

    def _with_tenant(self, request: JobRequest, client: Client) -> JobRequest:
        if not request.tenant:
            return replace(request, tenant=client.tenant) if client.tenant else request
        if self._tenants is not None and client.tenant and request.tenant != client.tenant:
            message = f"tenant: this key belongs to {client.tenant!r}"
            raise InvalidField(message, field="tenant")
        return request

    def _find(self, job: str, client: Client) -> Stream:
        """The job, if this client may know of it."""
        stream = self._streams.get(job)
        is_foreign = (
            self._tenants is not None
            and stream is not None
            and (stream.client is not client and stream.tenant != client.tenant)
        )
        if stream is None or is_foreign:
            raise UnknownJob(f"job: nobody knows {job!r} here", field="job")
        return stream

    def _on_cancel(self, peer: Peer, client: Client, message: Message) -> None:
        stream = self._find(read_cancel(message.body), client)
        if stream.state is StreamState.ENDED:
            self._attach(stream, client)
            stream.terminal_sent = False
            client.waiting[stream.job] = stream
        elif stream.state is StreamState.PREPARING:
            stream.is_cancelled = True
        else:
            self._ledger.tell(Cancel(stream.job))

    def _on_resume(self, peer: Peer, client: Client, message: Message) -> None:
        resume = Resume.from_body(message.body)
        stream = self._find(resume.job, client)
        stream.rewind(resume.after)
        self._attach(stream, client)

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

    def _on_credit(self, peer: Peer, client: Client, message: Message) -> None:
        client.credit = max(client.credit, read_credit(message.body))

    def _on_stats(self, peer: Peer, client: Client, message: Message) -> None:
        job = read_stats_question(message.body)
        body = self._worker_stats() if job is None else _job_stats(self._find(job, client))
        self._sender.try_answer(peer, MessageType.STATS, body)

    def _worker_stats(self) -> dict[str, object]:
        state = self._state
        return {
            "ready": state.ready,
            "running": state.num_running,
            "waiting": state.num_queued,
            "clients": sum(client.peer is not None for client in self._clients.values()),
            "streams": len(self._streams) - len(self._ended),
            "events_sent": self._sender.num_events,
            "messages_sent": self._sender.num_messages,
        }

    # ------------------------------------------------------------ from text and ledger

    def _on_prepared(self, message: Prepared) -> None:
        stream = message.context
        if not isinstance(stream, Stream) or self._streams.get(stream.job) is not stream:
            return
        request = message.request
        stops, min_tokens = request.params.stop, message.min_tokens
        stream.open(message, Detokenizer(self._vocabulary, stops, min_tokens))
        seed = request.params.seed
        stream.seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        submit = Submit(
            prepared=replace(message, context=None),
            door=self,
            attempt=stream.attempt,
            seed=stream.seed,
            prefix_ids=request.have,
            deadline_ns=stream.deadline_ns,
        )
        self._ledger.tell(submit)

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
        log.info("request.rejected", job=stream.job, code=error.code, field=error.field)
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
            self._ledger.tell(Cancel(stream.job))

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
            if type(event) is Tokens:
                sender.add(stream, event)
            else:
                self._end(stream, event)

    def _end(self, stream: Stream, event: Any) -> None:
        stream.end(event)
        self._ended.append(stream)
        stream.client.waiting[stream.job] = stream
        self._dirty.add(stream.client)

    def _on_released(self, message: Released) -> None:
        """The worker drains: another one may run these jobs."""
        for job in message.jobs:
            stream = self._streams.get(job)
            if stream is not None:
                error = Draining("the worker stops; submit again elsewhere", retry_ms=1_000)
                self._end(stream, Failed(job, stream.attempt, stream.last_seq, error))

    def _on_engine_state(self, message: EngineState) -> None:
        self._state = message

    def _on_drain(self, message: Drain) -> None:
        for client in self._clients.values():
            if client.peer is not None:
                body = {"drain_ms": message.drain_ms}
                self._sender.answer(client.peer, MessageType.DRAIN, body)

    def _on_backlog(self, stream: Stream, is_over: bool) -> None:
        """A slow client: its job waits, nobody else's."""
        stream.is_paused = is_over
        if stream.state is not StreamState.ENDED:
            self._ledger.tell(Pause(stream.job) if is_over else Unpause(stream.job))

    # ------------------------------------------------------------ regular work

    def _unblock(self) -> None:
        self._unblocks = False
        self._sender.unblock()
        self.after_burst()

    def _sweep(self) -> None:
        """Ask silent clients for a sign of life, give up the gone, forget old jobs."""
        now_s = self._loop.time()
        gone_s = self._config.gone_ms / 1000
        heartbeat_s = self._config.heartbeat_ms / 1000
        for client in list(self._clients.values()):
            silent_s = now_s - client.last_heard_s
            if silent_s > gone_s:
                self._give_up(client)
            elif client.peer is not None and silent_s > heartbeat_s:
                self._sender.try_answer(client.peer, MessageType.PING, {"t": int(now_s * 1000)})
        for routing_id, peer in list(self._peers.items()):
            if now_s - peer.last_heard_s > gone_s and now_s >= peer.muted_until_s:
                del self._peers[routing_id]
        self._forget_old()

    def _give_up(self, client: Client) -> None:
        log.info("client.gone", client=client.name, streams=len(client.streams))
        for stream in client.streams.values():
            stream.is_attached = False
            if stream.state is StreamState.PREPARING:
                stream.is_cancelled = True
            elif stream.state is StreamState.LIVE:
                self._ledger.tell(Cancel(stream.job))
        client.waiting.clear()
        client.peer = None
        del self._clients[client.name]

    def _forget_old(self) -> None:
        keep_from_s = time.monotonic() - self._config.retain_ms / 1000
        ended = self._ended
        while ended and (len(ended) > self._config.retain_jobs or ended[0].ended_s < keep_from_s):
            self._forget(ended.popleft())

    def _forget(self, stream: Stream) -> None:
        if self._streams.get(stream.job) is stream:
            del self._streams[stream.job]
        stream.client.streams.pop(stream.job, None)
        stream.client.waiting.pop(stream.job, None)


def _welcome(config: BrokerConfig, zmq_config: ZmqConfig) -> Welcome:
    return Welcome(
        worker=config.worker,
        boot=secrets.token_hex(8),
        queue=config.queue,
        models=(config.model_name,),
        heartbeat_ms=zmq_config.heartbeat_ms,
        retain_ms=zmq_config.retain_ms,
        limits=Limits(zmq_config.max_body_bytes, zmq_config.max_frame_bytes),
    )


def _job_stats(stream: Stream) -> dict[str, object]:
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
