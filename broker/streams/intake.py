"""New entries and abandoned ones: the two ways a job comes into this worker's hands.

Reading asks for as many entries as there are free slots and leaves the rest to other workers.
Claiming looks through the group's pending entries every quarter of a lease, without any lock: the
claim itself is atomic, and the fence decides in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from broker.streams.lane import LinkLost, Reply, ReplyError
from broker.streams.link import wait_for
from broker.streams.pickup import Pickup
from broker.streams.scripts import script
from broker.streams.state import RETRY_S, DoorState
from tokenbus.keys import GROUP

log = structlog.get_logger("broker.streams")

IDLE_PING_S = 30.0
BLOCK_MARGIN_S = 2.0  # a blocking read may take so much longer than its BLOCK
UNKNOWN_IDLE_MS = 2_000  # a reply to a read is not under way for longer


class Reader:
    """Reads new entries, high priority first, with a share kept for low."""

    def __init__(
        self, state: DoorState, pickup: Pickup, on_no_group: Callable[[], Awaitable[None]]
    ) -> None:
        self._state = state
        self._pickup = pickup
        self._on_no_group = on_no_group
        self._low_credit = 0.0
        self.is_done = asyncio.Event()

    async def run(self) -> None:
        """Read until a drain begins."""
        state = self._state
        while not state.is_draining:
            await state.link.up.wait()
            is_free = await wait_for(state.may_read, IDLE_PING_S)
            free = state.free_slots
            try:
                if not is_free:  # or the server may close an idle connection
                    await state.link.reader.call("PING")
                elif free <= 0:
                    state.check_slots()
                elif not await self._take(free):
                    await self._wait_for_one(free)
                state.clear_trouble("read")
            except LinkLost:
                await asyncio.sleep(0.01)
            except ReplyError as error:
                await self._on_error(error)
        self.is_done.set()

    async def unblock(self) -> None:
        """Make a blocking read return now: a drain has begun."""
        self._state.may_read.set()
        if self._state.link.reader_id:
            await self._state.link.run([("CLIENT", "UNBLOCK", self._state.link.reader_id)])

    async def _on_error(self, error: ReplyError) -> None:
        if error.is_no_group:
            await self._on_no_group()
        else:
            self._state.report_trouble("read", error)
            await asyncio.sleep(RETRY_S)

    async def _take(self, free: int) -> bool:
        """Entries that are there; whether there were any."""
        state = self._state
        self._low_credit += free * state.config.limits.low_share
        keep_for_low = min(int(self._low_credit + 1e-9), free)  # ten times 0.1 is a whole one
        asked_at = state.now()
        args = (GROUP, state.worker, free, keep_for_low)
        taken = await state.link.call(*script("take", state.streams, args))
        num_low = 0
        for index, entry, fields in sorted(taken, key=lambda item: int(item[0])):
            num_low += index == 3
            self._pickup.take(state.streams[index - 1], entry.decode(), fields, asked_at)
        state.counters.read += len(taken)
        # Unused credit is not saved up, or a burst of low would hold up high later.
        self._low_credit = min(max(0.0, self._low_credit - num_low), 1.0)
        return bool(taken)

    async def _wait_for_one(self, free: int) -> None:
        """Block until an entry comes. Each stream may give one, so a few too many can come when
        they arrive at the same moment: those are given back.
        """
        state, lane = self._state, self._state.link.reader
        block_ms = state.redis.block_ms
        asked_at = state.now()
        reply: Reply = await lane.call(
            *("XREADGROUP", "GROUP", GROUP, state.worker, "COUNT", 1, "BLOCK", block_ms),
            *("STREAMS", *state.streams, ">", ">", ">"),
            timeout_s=block_ms / 1000 + BLOCK_MARGIN_S,
        )
        for stream, entries in reply or []:
            for entry, fields in entries:
                state.counters.read += 1
                free -= 1
                self._pickup.take(stream.decode(), entry.decode(), fields, asked_at)
        if state.is_draining:
            self._pickup.release_unfenced()
        elif free < 0:
            self._pickup.release_unfenced(-free)


class Claimer:
    """Takes over what other workers left behind, and finds what a lost reply left to nobody."""

    def __init__(
        self,
        state: DoorState,
        pickup: Pickup,
        is_engine_alive: Callable[[], bool],
        on_no_group: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = state
        self._pickup = pickup
        self._is_engine_alive = is_engine_alive
        self._on_no_group = on_no_group
        self._leases_from = 0.0
        self._is_fresh = False  # the connection is new: a reply to a read may have been lost
        self.wake = asyncio.Event()

    def on_reconnect(self) -> None:
        """Redis was away, and every lease has aged meanwhile: leave others time to renew theirs.
        Look at once for entries that were read into the broken connection.
        """
        self._leases_from = self._state.new_lease_end(self._state.now())
        self._is_fresh = True
        self.wake.set()

    async def run(self) -> None:
        """Look after a quarter of a lease, or when somebody says that entries were released."""
        quarter_s = self._state.redis.lease_ms / 4_000
        while not self._state.is_draining:
            await self._state.link.up.wait()
            try:
                await self._claim_all()
                self._state.clear_trouble("claim")
            except LinkLost:
                await asyncio.sleep(0.01)
            except ReplyError as error:
                if error.is_no_group:
                    await self._on_no_group()
                else:
                    self._state.report_trouble("claim", error)
            await wait_for(self.wake, quarter_s * random.uniform(0.75, 1.25))
            self.wake.clear()

    async def _claim_all(self) -> None:
        state = self._state
        unknown_idle_ms = 0 if self._is_fresh else UNKNOWN_IDLE_MS
        for stream in state.streams:
            if state.free_slots <= 0 or not self._is_engine_alive():
                return
            asked_at = state.now()
            lease_ms = state.redis.lease_ms if asked_at >= self._leases_from else ""
            known = [job.entry for job in state.jobs.entries_of(stream)]
            args = (GROUP, state.worker, lease_ms, state.free_slots, unknown_idle_ms, *known)
            taken, num_deleted = await state.link.call(*script("claim", (stream,), args))
            for entry, fields, released in taken:
                log.info("stream.claimed", entry=entry.decode(), released=bool(released))
                self._pickup.take(stream, entry.decode(), fields, asked_at)
            state.counters.claimed += len(taken)
            state.counters.taken_over += sum(not released for *_, released in taken)
            if num_deleted:
                state.counters.deleted += num_deleted
                log.warning("entries.deleted", stream=stream, count=num_deleted)
        self._is_fresh = False
