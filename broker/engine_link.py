"""The engine link actor: owns the listening socket and the two rings of the engine.

Writes runs to the request ring and hands what comes out of the token ring to the ledger, whole
batches at a time. Knows records and rings; knows no job. One engine at a time: a second connection
is refused while the first lives.

A full request ring is back-pressure: what does not fit waits here in order (the ledger stops
starting runs when it hears `RingState`), and goes out when the engine makes room.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import structlog

from broker.actor import Actor, ActorSystem, Overflow
from broker.engine_watchdog import Watchdog, is_alive
from broker.link_messages import (
    AbortRuns,
    EngineGone,
    EngineProgress,
    EngineStats,
    PauseRuns,
    ResumeRuns,
    RingState,
    RunRejected,
    ShutdownEngine,
    StartRun,
    Steps,
    engine_up,
)
from broker.messages import Address
from broker.ring.errors import RecordTooLarge, RingCorrupt, RingError
from broker.ring.link import BrokerLink, LinkListener
from broker.ring.records import (
    Kind,
    Reject,
    StepEvents,
    decode_json,
    decode_reject,
    decode_step,
    encode_rids,
    encode_submit,
)

log = structlog.get_logger("broker.link")

BATCH_RECORDS = 64  # then the loop gets a turn
POLL_S = 0.02  # a lost wake-up costs at most this; see broker.ring.wake
WATCH_S = 0.5  # how often the watchdog looks


class EngineLink(Actor):
    """Mailbox policy CRASH: the ledger bounds what it sends by the engine's capacity.

    `ledger` gets everything; `listeners` get EngineUp, EngineGone and EngineProgress.
    """

    def __init__(self, system: ActorSystem, path: str, ring_bytes: int, hang_ms: int) -> None:
        super().__init__(system, "engine_link", overflow=Overflow.CRASH)
        self._watchdog = Watchdog(hang_ms / 1000)
        self._listener = LinkListener(path, ring_bytes)
        self._listeners: list[Address] = []
        self._ledger: Address | None = None
        self._link: BrokerLink | None = None
        self._engine_pid = 0
        self._backlog: deque[tuple[int, bytes]] = deque()
        self._is_reading = False
        self._waits_for_room = False
        self._on_bell = self.guard(self._answer_bell)
        self._on_events = self.guard(self._read_events)
        system.spin.look, system.spin.rest = self._look, self.guard(self._sleep)
        self._on_room = self.guard(self._write_backlog)

    def connect(self, ledger: Address, listeners: Sequence[Address]) -> None:
        """Who is told. Call before `start`."""
        self._ledger = ledger
        self._listeners = [ledger, *listeners]

    def start(self) -> None:
        """Accept engines."""
        self._loop.add_reader(self._listener.fileno(), self.guard(self._accept))
        self.every(POLL_S, self._look_anyway)
        self.every(WATCH_S, self._watch)

    async def stop(self) -> None:
        """Drop the engine and the socket."""
        self._loop.remove_reader(self._listener.fileno())
        self._drop_link()
        self._listener.close()

    # ------------------------------------------------------------ to the engine

    def handle(self, message: object) -> None:
        """Write one record, or keep it until there is room."""
        if isinstance(message, StartRun):
            self._start_run(message)
        elif isinstance(message, AbortRuns):
            self._write(Kind.ABORT, encode_rids(list(message.rids)))
        elif isinstance(message, PauseRuns):
            self._write(Kind.PAUSE, encode_rids(list(message.rids)))
        elif isinstance(message, ResumeRuns):
            self._write(Kind.RESUME, encode_rids(list(message.rids)))
        elif isinstance(message, ShutdownEngine):
            self._write(Kind.SHUTDOWN, b"")
        else:
            raise TypeError(f"the engine link takes no {type(message).__name__}")

    def _start_run(self, message: StartRun) -> None:
        try:
            self._write(Kind.SUBMIT, encode_submit(message.run))
        except RecordTooLarge as error:
            reject = Reject(message.run.rid, "too_long", "prompt_ids", f"prompt: {error}")
            self._tell_ledger(RunRejected(reject))

    def _write(self, kind: Kind, payload: bytes) -> None:
        link = self._link
        if link is None:
            return  # the ledger learns of the loss by EngineGone, and starts its runs again
        if not self._backlog and link.requests.try_write(kind, payload):
            return
        if len(payload) > link.requests.max_payload_bytes:
            raise RecordTooLarge(f"record of {len(payload)} bytes does not fit the ring")
        if not self._backlog:
            self._tell_ledger(RingState(is_full=True))
        self._backlog.append((kind, payload))
        self._wait_for_room(link)

    def _wait_for_room(self, link: BrokerLink) -> None:
        if not self._waits_for_room:
            self._waits_for_room = True
            link.requests.prepare_wait(len(self._backlog[0][1]))
            self._loop.add_reader(link.requests.fileno(), self._on_room)

    def _write_backlog(self) -> None:
        link = self._link
        if link is None or not self._waits_for_room:
            return
        link.requests.finish_wait()
        while self._backlog and link.requests.try_write(*self._backlog[0]):
            self._backlog.popleft()
        if self._backlog:
            link.requests.prepare_wait(len(self._backlog[0][1]))
            return
        self._waits_for_room = False
        self._loop.remove_reader(link.requests.fileno())
        self._tell_ledger(RingState(is_full=False))

    # ------------------------------------------------------------ from the engine

    def _accept(self) -> None:
        try:
            link = self._listener.accept()
        except RingError as error:
            log.warning("engine.refused", error=str(error))
            return
        if self._link is not None:
            if not self._link.is_peer_gone():
                log.warning("engine.refused", error="one is connected", pid=link.peer_pid)
                link.close()
                return
            self._lose_engine()
        self._link = link
        self._engine_pid = link.peer_pid
        log.info("engine.connected", pid=link.peer_pid)
        self._loop.add_reader(link.sock.fileno(), self.guard(self._peer_gone))
        self._loop.add_reader(link.events.fileno(), self._on_bell)
        self._read_events()

    def _peer_gone(self) -> None:
        if self._link is not None and self._link.is_peer_gone():
            self._lose_engine()

    def _look_anyway(self) -> None:
        """The safety net under the bells."""
        if self._link is None:
            return
        if self._link.events.has_records():
            self._read_events()
        if self._waits_for_room:
            self._write_backlog()

    def _watch(self) -> None:
        """An engine that hangs is killed: its end is then handled like any other."""
        if self._link is None or not self._watchdog.is_hung(self._loop.time()):
            return
        self._watchdog.forget()
        pid = self._link.peer_pid
        log.error("engine.hung", pid=pid, silent_s=round(self._watchdog.silent_s, 1))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _look(self) -> None:
        """The loop does not sleep now, and looks by itself."""
        if self._link is not None and self._link.events.has_records():
            self._on_events()

    def _answer_bell(self) -> None:
        if self._link is not None:
            self._link.events.finish_wait()
            self._read_events()

    def _read_events(self) -> None:
        """Deliver one batch; then sleep on the bell, or come back after the others' turn."""
        link = self._link
        if link is None:
            return
        link.events.stay_awake()
        try:
            records = link.events.read_batch(BATCH_RECORDS)
        except RingCorrupt as error:
            log.error("ring.corrupt", error=str(error))
            self._lose_engine(drain=False)
            return
        if records:
            self.system.spin.heard()
        self._deliver(records)
        if not self.system.spin.is_awake:
            self._sleep()

    def _sleep(self) -> None:
        """Wait for the bell, unless something came meanwhile."""
        link = self._link
        if link is not None and not link.events.prepare_wait() and not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._is_reading = False
        self._on_events()

    def _deliver(self, records: list[tuple[int, bytes]]) -> None:
        if records:
            self._watchdog.heard(self._loop.time())
        steps: list[StepEvents] = []
        for kind, payload in records:
            if kind == Kind.STEP:
                step = decode_step(payload)
                self._watchdog.note_step(step.step_us)
                steps.append(step)
                continue
            if steps:
                self._tell_ledger(Steps(steps))
                steps = []
            self._deliver_rare(kind, payload)
        if steps:
            self._tell_ledger(Steps(steps))

    def _deliver_rare(self, kind: int, payload: bytes) -> None:
        if kind == Kind.REJECT:
            self._tell_ledger(RunRejected(decode_reject(payload)))
        elif kind == Kind.STATS:
            self._tell_ledger(EngineStats(decode_json(payload)))
        elif kind == Kind.READY:
            self._watchdog.ready(self._loop.time())
            self._tell_all(engine_up(decode_json(payload), self._engine_pid))
        elif kind == Kind.PROGRESS:
            self._tell_all(EngineProgress(decode_json(payload)))
        else:
            raise ValueError(f"unknown record kind {kind} from the engine")

    def _lose_engine(self, drain: bool = True) -> None:
        """Take what the dead engine had published (drain), then tell."""
        link = self._link
        if link is None:
            return
        while drain and (records := link.events.read_batch(BATCH_RECORDS)):
            self._deliver(records)
        pid = self._engine_pid
        self._drop_link()
        log.warning("engine.gone", pid=pid, alive=is_alive(pid))
        self._tell_all(EngineGone(pid))

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        self._watchdog.forget()
        if link is None:
            return
        self._loop.remove_reader(link.sock.fileno())
        self._loop.remove_reader(link.events.fileno())
        if self._waits_for_room:
            self._loop.remove_reader(link.requests.fileno())
        self._waits_for_room = False
        self._backlog.clear()
        link.close()

    def _tell_ledger(self, message: object) -> None:
        if self._ledger is not None:
            self._ledger.tell(message)

    def _tell_all(self, message: object) -> None:
        for listener in self._listeners:
            listener.tell(message)
