"""The control stream: wishes of clients and operators, read by every worker of the queue.

| op | other fields | what |
|---|---|---|
| `cancel` | `job` | end that job, if it is here |
| `drain` | `worker` (an id, or `*`) | take no new jobs, finish or give back the rest, then exit |
| `released` | `worker` | it gave entries back: others may look for them now |

What this worker does not know is ignored: another may.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import structlog

from broker.streams.entries import flat
from broker.streams.lane import LinkLost
from broker.streams.scripts import script
from broker.streams.state import DoorState
from broker.streams.tail import read_new
from tokenbus.entries import event_to_entry
from tokenbus.events import Done, Usage
from tokenbus.keys import GROUP

log = structlog.get_logger("broker.streams")

MAX_ENTRIES = 256
_ENTRY_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}\Z")


class Control:
    """Follows the control stream from the moment the worker first reached Redis."""

    def __init__(
        self, state: DoorState, on_released: Callable[[], None], on_drain: Callable[[], None]
    ) -> None:
        self._state = state
        self._on_released = on_released
        self._on_drain = on_drain
        self._last_id = ""
        self._elsewhere: list[str] = []  # jobs to cancel that are not here

    async def catch_up(self) -> None:
        """On a fresh connection: find the end of the stream, or the wishes that were missed.

        Raises LinkLost or ReplyError.
        """
        state, key = self._state, self._state.keys.control
        if not self._last_id:
            last = await state.link.call("XREVRANGE", key, "+", "-", "COUNT", 1)
            self._last_id = last[0][0].decode() if last else "0-0"
        # The stream is short, so a long absence can miss wishes; the marks stay for a day.
        jobs = [job for job in state.jobs if not job.is_cancelled]
        marks = await state.link.run([("EXISTS", state.keys.cancel(job.id)) for job in jobs])
        for job, mark in zip(jobs, marks, strict=True):
            if mark == 1:
                state.cancel(job)

    async def run(self) -> None:
        """Read for ever."""
        state = self._state
        key = state.keys.control
        while True:
            await state.link.up.wait()
            new = await read_new(
                state, lambda: state.link.control, "control", {key: self._last_id}, MAX_ENTRIES
            )
            for entry, fields in new[0][1] if new else []:
                self._last_id = entry.decode()
                self._obey(dict(zip(fields[::2], fields[1::2], strict=True)))
            await self._cancel_elsewhere()

    def _obey(self, fields: dict[bytes, bytes]) -> None:
        op = fields.get(b"op", b"")
        if op == b"cancel":
            job_id = fields.get(b"job", b"").decode(errors="replace")
            job = self._state.jobs.by_id(job_id)
            held = [job] if job else self._state.jobs.before_fence(job_id)
            for each in held:
                self._state.cancel(each)
            if not held:
                self._elsewhere.append(job_id)
        elif op == b"released":
            if fields.get(b"worker") != self._state.worker.encode():
                self._on_released()
        elif op == b"drain" and fields.get(b"worker") in (b"*", self._state.worker.encode()):
            log.info("drain.requested")
            self._on_drain()

    async def _cancel_elsewhere(self) -> None:
        """End queued jobs at once instead of when their turn comes, and forget wishes that came
        after the end.
        """
        jobs, self._elsewhere = self._elsewhere, []
        state, keys = self._state, self._state.keys
        done = Done("", 1, 0, "cancelled", "", Usage(), 0)
        fields = flat(event_to_entry(done))
        commands = [
            script(
                "cancel",
                (
                    *(keys.job(job), keys.out(job), keys.cancel(job)),
                    *(state.streams if _ENTRY_ID.match(job) else ()),
                ),
                (GROUP, job, state.redis.reply_ttl_ms, *fields),
            )
            for job in jobs
        ]
        with suppress(LinkLost):  # then the mark ends them when their turn comes
            await state.link.run(commands)
