"""The Redis door as an actor: its mailbox and its parts.

A job's way: `intake` reads or claims the entry, `pickup` parses, prepares and fences it, the ledger
runs it, `outbox` publishes and ends it; `leases` keeps it ours meanwhile. All parts share one
`DoorState` on the broker's event loop; each part's task has its own lane to Redis or shares the
command lane, and no task is ever cancelled with a reply outstanding that another would read.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from broker.actor import Actor, ActorSystem, Overflow
from broker.config import BrokerConfig
from broker.messages import (
    Accepted,
    Address,
    Cancel,
    Capacity,
    Done,
    Drain,
    Drop,
    EngineState,
    Failed,
    Find,
    Follow,
    Pause,
    Prepared,
    PrepareFailed,
    Publish,
    Refused,
    Released,
    SubmitDurable,
    Tokens,
    Unpause,
)
from broker.streams.address import parse_redis_url
from broker.streams.backlog import Backlog, BacklogWatch
from broker.streams.control import Control
from broker.streams.entries import done_fields, failed_fields
from broker.streams.health import Health
from broker.streams.intake import Claimer, Reader
from broker.streams.jobs import Ending, Stage
from broker.streams.lane import LinkLost
from broker.streams.leases import Heartbeat, Leases
from broker.streams.link import Link
from broker.streams.outbox import Outbox
from broker.streams.pickup import Pickup
from broker.streams.relay import Relay
from broker.streams.state import Counters, DoorState
from tokenbus.errors import InvalidField

log = structlog.get_logger("broker.streams")

STOP_TIMEOUT_S = 3.0


class StreamsDoor(Actor):
    """Jobs from Redis streams to the ledger and its events back.

    monitor: told `DoorStatus` on every change, and `Drain` when somebody asks for it on the control
    stream. Raises InvalidField for a bad URL; crashes with `Unsupported` on a Redis that is unfit.
    """

    def __init__(
        self,
        system: ActorSystem,
        config: BrokerConfig,
        text: Address,
        ledger: Address,
        monitor: Address | None = None,
    ) -> None:
        super().__init__(system, "streams", overflow=Overflow.CRASH)
        if config.redis is None:
            raise InvalidField("redis: the Redis door needs a URL", field="redis")
        self._config = config
        self._monitor = monitor
        address = parse_redis_url(config.redis.url)
        self._state = state = DoorState(config, config.redis, self, text, ledger)
        timeout_s = config.redis.socket_timeout_ms / 1000
        self._health = health = Health(state, monitor, self.later)
        state.link = Link(address, state.keys.control, timeout_s, health.on_up, health.on_down)
        state.on_trouble = health.report
        self._outbox = Outbox(state)
        self._pickup = Pickup(state, self)
        state.next_suspect = self._pickup.next_suspect
        self._leases = Leases(state, health.on_no_group)
        self._heartbeat = Heartbeat(state)
        self._reader = Reader(state, self._pickup, health.on_no_group)
        self._claimer = Claimer(
            state, self._pickup, self._leases.is_engine_alive, health.on_no_group
        )
        self._relay = Relay(state)
        self._backlog = BacklogWatch(state)
        self._control = Control(state, self._claimer.wake.set, self._ask_for_drain)
        health.connect(self._outbox, self._leases, self._claimer, self._control, self._relay)

    # ------------------------------------------------------------ for the app

    @property
    def is_ready(self) -> bool:
        """Redis is connected and does what the door asks."""
        return self._health.is_ready

    @property
    def counters(self) -> Counters:
        """Counts since the start."""
        return self._state.counters

    @property
    def backlog(self) -> Backlog | None:
        """What waits in Redis; None while that is not known."""
        return self._backlog.seen

    @property
    def num_jobs(self) -> int:
        """Jobs in hand."""
        return len(self._state.jobs)

    # ------------------------------------------------------------ actor

    def start(self) -> None:
        self.spawn(self._state.link.keep(), "link")
        self.spawn(self._reader.run(), "reader")
        self.spawn(self._claimer.run(), "claimer")
        self.spawn(self._pickup.run(), "pickup")
        self.spawn(self._outbox.run(), "outbox")
        self.spawn(self._leases.run(), "leases")
        self.spawn(self._heartbeat.run(), "heartbeat")
        self.spawn(self._control.run(), "control")
        self.spawn(self._backlog.run(), "backlog")
        self.spawn(self._relay.run_writer(), "relay writer")
        self.spawn(self._relay.followed.run(), "relay reader")

    def handle(self, message: object) -> None:
        match message:
            case Publish():
                for event in message.events:
                    self._on_event(event)
            case Prepared():
                self._pickup.on_prepared(message)
            case PrepareFailed():
                self._pickup.on_prepare_failed(message)
            case Accepted() | Refused():
                self._on_answer(message)
            case Capacity():
                self._state.slots = message.slots
                self._state.check_slots()
            case EngineState():
                self._state.is_engine_ready = message.ready
                self._state.is_engine_loading = message.loading
                self._leases.on_progress(message.progress)
                self._state.vitals = _vitals(message)
            case Released():
                self._on_released(message)
            case Drain():
                self._drain()
            case _:
                self._relay_for(message)

    def _relay_for(self, message: object) -> None:
        """What the other door says about its durable jobs."""
        match message:
            case SubmitDurable():
                self._relay.submit(message)
            case Follow():
                self._relay.follow(message)
            case Find():
                self._relay.find(message)
            case Cancel():
                self._relay.cancel(message.job)
            case Pause() | Unpause():
                self._relay.pause(message.job, isinstance(message, Pause))
            case Drop():
                self._relay.drop(message.job)
            case _:
                raise TypeError(f"the Redis door does not know {type(message).__name__}")

    def after_burst(self) -> None:
        self._outbox.wake()

    async def stop(self) -> None:
        """Write what is finished, give the rest back, say good-bye.

        After a crash of the broker nothing is given back: the jobs' leases run out and the crash is
        counted, or a job that crashes brokers would go round for ever.
        """
        self._drain()
        is_crash = self.system.crashed.done()
        for job in self._state.jobs:
            if job.stage is Stage.RUNNING and not is_crash:
                self._state.end(job, Ending())
        if self._state.link.up.is_set() and not is_crash:
            with suppress(TimeoutError, LinkLost):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._reader.unblock()
                    await self._reader.is_done.wait()
                    while len(self._state.jobs):
                        await asyncio.sleep(0.005)
                    await self._heartbeat.leave()
        if len(self._state.jobs):
            log.warning("jobs.left_to_lease", count=len(self._state.jobs))
        self._state.link.close()

    # ------------------------------------------------------------ messages

    def _on_event(self, event: Tokens | Done | Failed) -> None:
        job = self._state.jobs.by_id(event.job)
        if job is None or job.attempt != event.attempt or job.ending is not None:
            return  # dropped, or ended, while the event was on its way
        if isinstance(event, Tokens):
            self._outbox.add(job, event)
        elif isinstance(event, Done):
            self._state.end(job, Ending(done_fields(event)))
        else:
            reason = event.error.message if event.dead else ""
            self._state.end(job, Ending(failed_fields(event.error), reason, event.error.retry))

    def _on_answer(self, message: Accepted | Refused) -> None:
        job = self._state.jobs.by_id(message.job)
        if job is None or job.attempt != message.attempt:
            return  # dropped, or taken anew, while the answer was on its way
        if isinstance(message, Refused):
            self._pickup.on_refused(job, message)
        else:
            # The capacity that counts this job comes in the same burst, if it changed at all.
            self._state.jobs.settle(job)
        self._state.check_slots()

    def _on_released(self, message: Released) -> None:
        for job_id, attempt in message.jobs:
            job = self._state.jobs.by_id(job_id)
            if job is not None and job.attempt == attempt and job.ending is None:
                self._state.end(job, Ending())

    def _drain(self) -> None:
        if self._state.is_draining or self.system.crashed.done():
            return
        self._state.is_draining = True
        self._state.check_slots()
        self._pickup.release_unfenced()
        self._claimer.wake.set()

    def _ask_for_drain(self) -> None:
        if self._monitor is not None:
            self._monitor.tell(Drain(self._config.drain_ms))


def _vitals(state: EngineState) -> dict[str, float]:
    load = {"running": state.num_running, "waiting": state.num_queued}
    return {**load, **(state.vitals or {})}
