"""The supervisor: an actor that starts the worker's processes, restarts each that dies, and drains.

One for one: a dead engine is started again beside a living broker, and the other way round. Knows
processes and their status lines; knows no job. A process that crashes again and again without ever
getting ready is given up, with an exit code that names it and a sentence that says what to do.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import structlog

from broker.actor import Actor, ActorSystem
from ops.child import Child, ChildSpec, describe_exit, start_child
from ops.exit_codes import CommandError, ExitCode
from ops.restart_policy import CRASH_WINDOW_S, CrashRecord
from ops.supervisor_messages import (
    Exited,
    Progress,
    Ready,
    Start,
    StatusLine,
    Stop,
    WorkerEvent,
)

log = structlog.get_logger("ops.supervisor")

DRAIN_MARGIN_S = 3.0  # for the broker to say goodbye after its own drain time
LAST_WORDS_S = 1.0  # for what a dead child wrote into its status pipe
HURRY_S = 5.0  # for the broker to give its jobs back when it must not wait for them
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL of the engine and Redis


class State(Enum):
    """The supervisor's life; only forward."""

    RUNNING = 1
    DRAINING = 2  # the broker has been told; running jobs finish
    STOPPING = 3  # the broker is gone; engine, then Redis
    STOPPED = 4


@dataclass(slots=True)
class _Slot:
    """A child's place: its spec, the running process, and its record."""

    spec: ChildSpec
    lost_code: ExitCode
    child: Child | None = None
    was_ready: bool = False  # since its last start
    failure: str = ""  # why it cannot run, in its own words
    crashes: CrashRecord = field(default_factory=CrashRecord)


_LOST_CODES = {"engine": ExitCode.ENGINE_LOST, "broker": ExitCode.BROKER_LOST}
# A child that ends with one of these has said why, and will say it again: no restart.
_REMEDIES = {
    ExitCode.BAD_SETTING: "docs/OPERATIONS.md lists every setting with its range.",
    ExitCode.MODEL_UNAVAILABLE: "`tokenbus model inspect MODEL` looks into a model, `tokenbus"
    " doctor` at this machine.",
    ExitCode.BUS_UNAVAILABLE: "Perhaps another worker runs here: `--zmq tcp://127.0.0.1:0` and"
    " `--http 127.0.0.1:0` take free ports, `tokenbus doctor` checks all addresses.",
}
_FINAL_CODES = frozenset(_REMEDIES)


class Supervisor(Actor):
    """Children in the order they are started; they stop in the order broker, engine, Redis.

    after_start: awaited after the child of that name was started and before the next one is (Redis
    must answer before the broker starts). on_event: called for each WorkerEvent. `finished`
    resolves to the exit code.
    """

    def __init__(
        self,
        system: ActorSystem,
        specs: Sequence[ChildSpec],
        *,
        drain_s: float,
        on_event: Callable[[WorkerEvent], None],
        after_start: dict[str, Callable[[], Awaitable[None]]] | None = None,
    ) -> None:
        super().__init__(system, "supervisor", capacity=4096)
        self._slots = {
            spec.name: _Slot(spec, _LOST_CODES.get(spec.name, ExitCode.BUS_UNAVAILABLE))
            for spec in specs
        }
        self._drain_s = drain_s
        self._on_event = on_event
        self._after_start = after_start or {}
        self._state = State.RUNNING
        self._result = ExitCode.OK
        self._was_ready = False
        self._is_hurried = False  # a second stop came
        self.failure: CommandError | None = None  # set before `finished`: what a person reads last
        self.finished: asyncio.Future[ExitCode] = system.loop.create_future()

    def start(self) -> None:
        """Start the children one after another."""
        self.spawn(self._start_all(), "start_all")

    def handle(self, message: object) -> None:
        """One message; see the message classes."""
        match message:
            case Start(name):
                if self._state in (State.RUNNING, State.DRAINING):
                    self.spawn(self._start_one(name), f"start_{name}")
            case Exited():
                self._on_exited(message)
            case StatusLine(name, data):
                self._on_status(name, data)
            case Stop(why):
                self._on_stop(why)
            case _:
                raise TypeError(f"supervisor got a {type(message).__name__}")

    async def stop(self) -> None:
        """Nothing of ours stays behind, whatever happened before."""
        for slot in self._slots.values():
            if slot.child is not None:
                slot.child.send(signal.SIGKILL)
                await slot.child.process.wait()

    # ------------------------------------------------------------ starting

    async def _start_all(self) -> None:
        try:
            for name in self._slots:
                if self._state is State.RUNNING:
                    await self._start_one(name)
        except CommandError as error:
            log.error("worker.cannot_start", error=error.message, remedy=error.remedy)
            self._result, self.failure = error.code, error
            self._on_stop("cannot start")

    async def _start_one(self, name: str) -> None:
        slot = self._slots[name]
        slot.was_ready = False
        child = await start_child(slot.spec)
        slot.child = child
        log.info("process.started", process=name, pid=child.pid)
        reading = self.spawn(self._read_status(child), f"status_{name}")
        self.spawn(self._watch(child, reading), f"watch_{name}")
        if self._state in (State.STOPPING, State.STOPPED):  # it was decided while it started
            child.send(signal.SIGKILL)
        if name in self._after_start:
            await self._after_start[name]()
            slot.was_ready = True

    async def _watch(self, child: Child, reading: asyncio.Task[None]) -> None:
        returncode = await child.process.wait()
        # What it said last comes first; a pipe that a process of its own still holds has no end.
        await asyncio.wait([reading], timeout=LAST_WORDS_S)
        self.tell(Exited(child.spec.name, child.pid, returncode))

    async def _read_status(self, child: Child) -> None:
        async for data in child.status_lines():
            self.tell(StatusLine(child.spec.name, data))

    # ------------------------------------------------------------ running

    def _on_status(self, name: str, data: dict[str, Any]) -> None:
        event = data.get("event")
        if event == "failed":
            self._slots[name].failure = str(data.get("error", ""))
            return
        if event == "draining" and self._state is State.RUNNING:
            self._begin_drain("asked over the bus")
        if event != "ready":
            self._on_event(Progress(data))
            return
        for slot in self._slots.values():
            slot.was_ready = True
        pids = {name: slot.child.pid for name, slot in self._slots.items() if slot.child}
        self._on_event(Ready(data, pids, is_first=not self._was_ready))
        self._was_ready = True

    def _on_exited(self, message: Exited) -> None:
        slot = self._slots[message.name]
        slot.child = None
        how = describe_exit(message.returncode)
        if message.name == "broker" and message.returncode == 0 and self._state is State.RUNNING:
            self._on_stop("drained over the bus")  # it ends with 0 after a drain only
        if self._state is State.RUNNING or (
            self._state is State.DRAINING and message.name == "engine" and message.returncode != 0
        ):
            log.warning("process.crashed", process=message.name, pid=message.pid, how=how)
            self._restart_or_give_up(slot, message)
            return
        log.info("process.stopped", process=message.name, pid=message.pid, how=how)
        self._continue_stop()

    def _restart_or_give_up(self, slot: _Slot, message: Exited) -> None:
        slot.crashes.add(time.monotonic(), was_ready=slot.was_ready)
        if message.returncode in _FINAL_CODES:
            code = ExitCode(message.returncode)
            why = slot.failure or "it said why, above"
            self._give_up(message.name, CommandError(code, why, _REMEDIES[code]))
        elif slot.crashes.is_hopeless:
            why = f"{slot.crashes.num_recent} crashes within {CRASH_WINDOW_S:.0f} s; see its log"
            why += f"; the last: {slot.failure}" if slot.failure else ""
            remedy = "`tokenbus doctor` checks this machine."
            self._give_up(message.name, CommandError(slot.lost_code, why, remedy))
        else:
            delay_s = slot.crashes.backoff_s
            log.info("process.restarting", process=message.name, delay_s=delay_s)
            self.later(delay_s, lambda: self._tell_start(message.name))

    def _tell_start(self, name: str) -> None:
        self.tell(Start(name))

    def _give_up(self, name: str, error: CommandError) -> None:
        log.error("worker.giving_up", process=name, why=error.message, exit_code=int(error.code))
        self._result = error.code
        self.failure = CommandError(error.code, f"{name}: {error.message}", error.remedy)
        self._drain_s = 0.0  # without its engine or broker no job can finish here
        self._on_stop(f"{name} lost")

    # ------------------------------------------------------------ stopping

    def _on_stop(self, why: str) -> None:
        if self._state is State.RUNNING:
            self._begin_drain(why)
            self._signal("broker", signal.SIGTERM)
        elif self._state is State.DRAINING:
            log.warning("worker.stopping_now", why=why)
            # Told again, the broker gives its Redis jobs back; told a third time, it has no time.
            # By another signal: two of a kind are one to a process that had no turn between them.
            self._signal("broker", signal.SIGKILL if self._is_hurried else signal.SIGINT)
            self._is_hurried = True
            self.later(HURRY_S, lambda: self._signal("broker", signal.SIGKILL))
        self._continue_stop()

    def _begin_drain(self, why: str) -> None:
        """The broker drains, or is about to be told: engine and broker may end from now on."""
        self._state = State.DRAINING
        log.info("worker.draining", why=why, drain_s=self._drain_s)
        self.later(self._drain_s + DRAIN_MARGIN_S, self._drain_expired)

    def _drain_expired(self) -> None:
        if self._state is State.DRAINING and self._is_running("broker"):
            log.warning("process.straggler", process="broker", drain_s=self._drain_s)
            self._signal("broker", signal.SIGKILL)

    def _continue_stop(self) -> None:
        """The next step of the stop: broker, engine, Redis; each only when the one before ended."""
        if self._is_running("broker"):
            return
        self._state = State.STOPPING
        for name in ("engine", "redis"):
            if self._is_running(name):
                self._signal(name, signal.SIGTERM)
                self.later(STOP_GRACE_S, lambda name=name: self._signal(name, signal.SIGKILL))  # type: ignore[misc]
                return
        self._state = State.STOPPED
        if not self.finished.done():
            log.info("worker.stopped", exit_code=int(self._result))
            self.finished.set_result(self._result)

    def _is_running(self, name: str) -> bool:
        slot = self._slots.get(name)
        return slot is not None and slot.child is not None

    def _signal(self, name: str, number: signal.Signals) -> None:
        slot = self._slots.get(name)
        if slot is not None and slot.child is not None:
            slot.child.send(number)
