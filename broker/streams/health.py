"""What happens when Redis comes, goes, or comes back empty, and what is said about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from broker.messages import Address, DoorStatus
from broker.streams.control import Control
from broker.streams.intake import Claimer
from broker.streams.jobs import Stage
from broker.streams.lane import LinkLost, ReplyError
from broker.streams.leases import Leases
from broker.streams.outbox import Outbox
from broker.streams.relay import Relay
from broker.streams.state import RETRY_S, DoorState
from tokenbus.keys import GROUP

log = structlog.get_logger("broker.streams")


class Health:
    """monitor: told `DoorStatus` on every change. later(delay_s, callback): the actor's."""

    def __init__(
        self,
        state: DoorState,
        monitor: Address | None,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._state = state
        self._monitor = monitor
        self._later = later
        self._down_reason = "connecting"
        self._was_up = False
        self._outbox: Outbox
        self._leases: Leases
        self._claimer: Claimer
        self._control: Control
        self._relay: Relay

    def connect(
        self, outbox: Outbox, leases: Leases, claimer: Claimer, control: Control, relay: Relay
    ) -> None:
        """The parts that act on a change. Call before the link begins."""
        self._outbox, self._leases = outbox, leases
        self._claimer, self._control, self._relay = claimer, control, relay

    @property
    def is_ready(self) -> bool:
        """Redis is connected and does what the door asks."""
        return self._state.link.up.is_set() and not self._state.troubles

    async def on_up(self) -> None:
        """A fresh connection: leases first, then the rest may go on."""
        state = self._state
        await self._ensure_groups()
        try:
            await self._leases.renew()
        except ReplyError as error:
            state.report_trouble("renew", error)
        if self._was_up:
            state.counters.reconnects += 1
            self._claimer.on_reconnect()
        self._was_up = True
        await self._control.catch_up()
        self._look_up_replies()
        self._down_reason = ""
        self._later(0.0, self.report)  # when the link's event is set

    def on_down(self, reason: str) -> None:
        """There is no connection, and why."""
        if reason != self._down_reason:
            log.warning("redis.lost", reason=reason)
        if not self._was_up:
            self._relay.on_unreachable()
        self._down_reason = reason
        self.report()

    async def on_no_group(self) -> None:
        """Redis came back empty while we were connected: make the groups, rebuild the replies."""
        log.error("redis.emptied", queue=self._state.config.queue)
        with suppress(LinkLost):
            try:
                await self._ensure_groups()
                self._look_up_replies()
            except ReplyError as error:
                self._state.report_trouble("groups", error)
                await asyncio.sleep(RETRY_S)
            else:
                self._state.clear_trouble("groups")

    def report(self) -> None:
        """Tell the monitor."""
        if self._monitor is None:
            return
        reason = self._down_reason or "; ".join(self._state.troubles.values())
        self._monitor.tell(DoorStatus("redis", self.is_ready, reason))

    async def _ensure_groups(self) -> None:
        """At 0, not at the end: what was added while there was no group is read too."""
        commands = [
            ("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM") for stream in self._state.streams
        ]
        for reply in await self._state.link.run(commands):
            if isinstance(reply, ReplyError) and reply.code != "BUSYGROUP":
                raise reply

    def _look_up_replies(self) -> None:
        for job in self._state.jobs:
            if job.attempt and job.stage in (Stage.RUNNING, Stage.ENDING):
                job.in_doubt = True
                job.due = 0.0
                self._outbox.push(job)
