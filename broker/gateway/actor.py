"""The gateway actor: speaks the protocol with many clients over one ROUTER.

Every message is checked before anything else sees it, and answered with a typed error if it is bad;
nothing a peer sends can stop the loop. Connections and clients are kept here, jobs in
`Jobs`; what goes out is up to `Sender`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from broker.actor import Actor, ActorSystem, Overflow
from broker.config import BrokerConfig, ZmqConfig
from broker.gateway.jobs import Jobs
from broker.gateway.roster import Roster
from broker.gateway.router import Router
from broker.gateway.security import Curve
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, Peer
from broker.gateway.shared import Wiring
from broker.gateway.table import StreamTable
from broker.messages import Address, Drain, EngineState
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
    NoSession,
    TokenbusError,
    TooLarge,
    Unsupported,
    VersionMismatch,
)
from tokenbus.parse import parse_submit
from tokenbus.protocol import MAJOR, Limits, Message, MessageType, decode

log = structlog.get_logger("broker.gateway")

UNBLOCK_PERIOD_S = 0.005

CHECKED_LATER = frozenset({MessageType.SUBMIT})
"""Every value of a job that is used is checked by its field's reader, whose error names the job."""


@dataclass(frozen=True, slots=True)
class GatewayCounts:
    """Numbers of this door. muted: connections that are ignored for now. events, messages: sent
    since the start. refused: jobs that were not taken, by error code.
    """

    num_clients: int
    num_muted: int
    num_streams: int
    num_events: int
    num_messages: int
    refused: Mapping[str, int]


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
        self._roster = Roster(curve.tenants if curve else None)
        self._router = Router(system.loop, self._config, curve)
        self.endpoint = self._router.endpoint
        self._sender = Sender(self._router, self._config.log_tokens_per_job)
        retain_ms, retain_jobs = self._config.retain_ms, self._config.retain_jobs
        self._table = StreamTable(retain_ms, retain_jobs, has_keys=curve is not None)
        self._jobs = Jobs(self._table, vocabulary, Wiring(self, text, ledger), self._sender)
        self._sender.on_backlog = self._jobs.on_backlog
        self._state = EngineState(ready=False, progress=0)
        self._unblocks = False
        self._from_client: dict[MessageType, Callable[[Peer, Client, Message], None]] = {
            MessageType.SUBMIT: self._on_submit,
            MessageType.CANCEL: self._on_cancel,
            MessageType.RESUME: self._on_resume,
            MessageType.CREDIT: self._on_credit,
            MessageType.STATS: self._on_stats,
        }
        self._from_actors: dict[type, Callable[[Any], None]] = {
            EngineState: self._on_engine_state,
            Drain: self._on_drain,
        }

    def connect_relay(self, relay: Address) -> None:
        """The Redis door, for durable jobs. Call before `start`."""
        self._jobs.connect_relay(relay)

    def start(self) -> None:
        """Receive."""
        self._router.start(self._on_frames, self.guard)
        self.every(self._config.heartbeat_ms / 2000, self._sweep)

    async def stop(self) -> None:
        """Close the socket."""
        self._router.close()

    def handle(self, message: object) -> None:
        """What text and ledger say."""
        kind = type(message)
        handler = self._jobs.handlers.get(kind) or self._from_actors.get(kind)
        if handler is None:
            raise TypeError(f"the gateway takes no {type(message).__name__}")
        handler(message)

    def after_burst(self) -> None:
        """One message a client, then the ends."""
        self._sender.flush_batch()
        dirty, self._jobs.dirty = self._jobs.dirty, set()
        for client in dirty:
            self._sender.flush_client(client)
        if self._sender.blocked and not self._unblocks:
            self._unblocks = True
            self.later(UNBLOCK_PERIOD_S, self._unblock)

    # ------------------------------------------------------------ frames

    def _on_frames(self, routing_id: bytes, frames: list[bytes], key: bytes) -> None:
        self.system.spin.heard()
        now_s = self._loop.time()
        peer = self._roster.hear(routing_id, now_s)
        if now_s < peer.muted_until_s:
            return
        try:
            message = decode(frames, self._limits, CHECKED_LATER)
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
        if kind is MessageType.REJECTED:
            self._jobs.refused[error.code] += 1
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
        self._roster.greet(peer, hello, key)
        self._sender.answer(peer, MessageType.WELCOME, self._welcome.to_body())

    # ------------------------------------------------------------ from clients

    def _on_submit(self, peer: Peer, client: Client, message: Message) -> None:
        self._jobs.submit(client, parse_submit(message.body, message.blobs))

    def _on_cancel(self, peer: Peer, client: Client, message: Message) -> None:
        self._jobs.cancel(client, read_cancel(message.body))

    def _on_resume(self, peer: Peer, client: Client, message: Message) -> None:
        resume = Resume.from_body(message.body)
        self._jobs.resume(client, resume.job, resume.after)

    def _on_credit(self, peer: Peer, client: Client, message: Message) -> None:
        client.credit = max(client.credit, read_credit(message.body))

    def _on_stats(self, peer: Peer, client: Client, message: Message) -> None:
        job = read_stats_question(message.body)
        body = self._worker_stats() if job is None else self._jobs.stats(client, job)
        if body is not None:
            self._sender.try_answer(peer, MessageType.STATS, body)

    def _worker_stats(self) -> dict[str, object]:
        state, counts = self._state, self.counts()
        engine = state.engine or {}
        return {
            **(state.vitals or {}),
            "ready": state.ready,
            "running": state.num_running,
            "waiting": state.num_queued,
            "clients": counts.num_clients,
            "streams": counts.num_streams,
            "events_sent": counts.num_events,
            "messages_sent": counts.num_messages,
            "used_blocks": engine.get("used_blocks", 0),
            "total_blocks": engine.get("total_blocks", 0),
        }

    def counts(self) -> GatewayCounts:
        """Who is here, and what was sent."""
        now_s = self._loop.time()
        return GatewayCounts(
            num_clients=sum(client.peer is not None for client in self._roster.clients),
            num_muted=self._roster.num_muted(now_s),
            num_streams=self._table.num_open,
            num_events=self._sender.num_events,
            num_messages=self._sender.num_messages,
            refused=self._jobs.refused,
        )

    # ------------------------------------------------------------ from text and ledger

    def _on_engine_state(self, message: EngineState) -> None:
        self._state = message

    def _on_drain(self, message: Drain) -> None:
        self._jobs.drain()
        for client in self._roster.clients:
            if client.peer is not None:
                body = {"drain_ms": message.drain_ms}
                self._sender.answer(client.peer, MessageType.DRAIN, body)

    # ------------------------------------------------------------ regular work

    def _unblock(self) -> None:
        self._unblocks = False
        self._sender.unblock()
        self.after_burst()

    def _sweep(self) -> None:
        """Ask silent clients for a sign of life, give up the gone, forget old jobs."""
        now_s = self._loop.time()
        for client in self._roster.remove_gone(now_s, self._config.gone_ms / 1000):
            log.info("client.gone", client=client.name, streams=len(client.streams))
            self._jobs.abandon(client)
        for peer in self._roster.silent(now_s, self._config.heartbeat_ms / 1000):
            self._sender.try_answer(peer, MessageType.PING, {"t": int(now_s * 1000)})
        self._table.forget_old()
        self.after_burst()  # streams whose client is gone went to others


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
