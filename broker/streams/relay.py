"""Jobs of the other door that go through Redis: put them in, follow their reply streams.

The other door hears what the ledger would tell it, whoever runs the job. The cursor of each
followed stream is its last entry id, so a lost connection repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import structlog

from broker.messages import (
    Accepted,
    Address,
    Done,
    Event,
    Failed,
    Follow,
    Publish,
    Refused,
    SubmitDurable,
    Tokens,
    Usage,
)
from broker.streams.entries import fingerprint_of, flat
from broker.streams.intake import BLOCK_MARGIN_S, IDLE_PING_S
from broker.streams.lane import LinkLost, Reply, ReplyError
from broker.streams.link import wait_for
from broker.streams.scripts import script
from broker.streams.state import RETRY_S, DoorState
from tokenbus import events
from tokenbus.entries import event_from_entry
from tokenbus.errors import BadFrame, Busy, Conflict, Internal
from tokenbus.keys import CANCEL_TTL_S, CONTROL_MAX_LEN
from tokenbus.parse import build_entry

log = structlog.get_logger("broker.streams")

ENTRIES_PER_READ = 64
BUSY_RETRY_MS = 1_000


@dataclass(slots=True)
class _Followed:
    """A reply stream that somebody follows. after: tokens up to this seq are known to the door."""

    door: Address
    after: int
    cursor: str = "0-0"
    is_accepted: bool = False
    is_paused: bool = False


class Relay:
    """Two tasks: one writes jobs and wishes, one reads reply streams."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self._followed: dict[str, _Followed] = {}
        self._to_submit: deque[SubmitDurable] = deque()
        self._to_cancel: deque[str] = deque()
        self._wake_writer = asyncio.Event()
        self._wake_reader = asyncio.Event()

    # ------------------------------------------------------------ messages

    def submit(self, message: SubmitDurable) -> None:
        """A new job; refused where the queue in Redis is full."""
        self._to_submit.append(message)
        self._wake_writer.set()

    def follow(self, message: Follow) -> None:
        """A job that is in Redis."""
        self._followed[message.job] = _Followed(message.door, message.after)
        self._wake_writer.set()  # which unblocks the reader
        self._wake_reader.set()

    def cancel(self, job: str) -> None:
        """Ask whoever runs the job to end it; the end comes as an event."""
        self._to_cancel.append(job)
        self._wake_writer.set()

    def pause(self, job: str, wanted: bool) -> None:
        """Read no more of this stream for now, or again."""
        followed = self._followed.get(job)
        if followed is not None and followed.is_paused != wanted:
            followed.is_paused = wanted
            self._wake_writer.set()
            self._wake_reader.set()

    def drop(self, job: str) -> None:
        """Nobody follows the job any more; it runs on."""
        self._followed.pop(job, None)

    # ------------------------------------------------------------ writing

    async def run_writer(self) -> None:
        """Submit and cancel, for ever."""
        state = self._state
        while True:
            await self._wake_writer.wait()
            await state.link.up.wait()
            self._wake_writer.clear()
            try:
                await self._write()
                state.clear_trouble("relay")
            except LinkLost:  # sent again: a job that is there twice runs once
                self._wake_writer.set()
                await asyncio.sleep(0.01)
            except ReplyError as error:
                state.report_trouble("relay", error)
                self._wake_writer.set()
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        link, keys = self._state.link, self._state.keys
        while self._to_submit:
            message = self._to_submit[0]
            await self._submit(message)
            self._to_submit.popleft()
        while self._to_cancel:
            job = self._to_cancel[0]
            await link.call("SET", keys.cancel(job), 1, "EX", CANCEL_TTL_S)
            add = ("XADD", keys.control, "MAXLEN", "~", CONTROL_MAX_LEN, "*")
            await link.call(*add, "op", "cancel", "job", job)
            self._to_cancel.popleft()
        if link.relay_id:
            await link.call("CLIENT", "UNBLOCK", link.relay_id)

    async def _submit(self, message: SubmitDurable) -> None:
        state, request = self._state, message.request
        fields = build_entry(request)
        fields.pop("durable", None)  # it is now
        fields.pop("priority", None)  # the stream says it
        mark = fingerprint_of({name.encode(): value.encode() for name, value in fields.items()})
        names = (state.keys.job(request.job), state.keys.jobs(request.priority), *state.streams)
        args: list[str | int] = [state.redis.queue_limit, mark, *flat(fields)]
        verdict = await state.link.call(*script("submit", names, args))
        if verdict == b"busy":
            busy = Busy("the queue in Redis is full", retry_ms=BUSY_RETRY_MS)
            message.door.tell(Refused(request.job, busy))
        elif verdict == b"conflict":
            taken = Conflict(f"job {request.job!r} is another request in Redis", field="job")
            message.door.tell(Refused(request.job, taken))
        else:
            self.follow(Follow(request.job, message.door))

    # ------------------------------------------------------------ reading

    async def run_reader(self) -> None:
        """Follow the reply streams, for ever."""
        state = self._state
        block_ms = state.redis.block_ms
        while True:
            await state.link.up.wait()
            active = {job: f for job, f in self._followed.items() if not f.is_paused}
            if not active:
                await self._idle()
                continue
            names = {state.keys.out(job): job for job in active}
            try:
                reply = await state.link.relay.call(
                    *("XREAD", "COUNT", ENTRIES_PER_READ, "BLOCK", block_ms, "STREAMS"),
                    *names,
                    *(followed.cursor for followed in active.values()),
                    timeout_s=block_ms / 1000 + BLOCK_MARGIN_S,
                )
            except LinkLost:
                await asyncio.sleep(0.01)
                continue
            except ReplyError as error:
                if not error.is_no_group:
                    state.report_trouble("relay", error)
                await asyncio.sleep(RETRY_S)
                continue
            for name, entries in reply or []:
                self._deliver(names[name.decode()], entries)

    async def _idle(self) -> None:
        """Wait for something to follow, without letting the server close the lane meanwhile."""
        self._wake_reader.clear()
        if not await wait_for(self._wake_reader, IDLE_PING_S):
            with suppress(LinkLost):
                await self._state.link.relay.run([("PING",)])

    def _deliver(self, job: str, entries: list[Reply]) -> None:
        followed = self._followed.get(job)
        if followed is None:
            return
        out: list[Event] = []
        for entry, fields in entries:
            followed.cursor = entry.decode()
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            try:
                event = event_from_entry(job, followed.cursor, values)
            except BadFrame as error:
                log.error("relay.bad_entry", job=job, entry=followed.cursor, error=str(error))
                out.append(Failed(job, 0, followed.after, Internal("the reply is damaged")))
                self.drop(job)
                break
            if isinstance(event, events.Started):
                self._accept(followed, event)
            elif isinstance(event, events.Tokens):
                out.extend(_new_part(event, followed))
            elif event is not None:
                out.append(_end_of(event))
                self.drop(job)
        if out:
            followed.door.tell(Publish(out))

    def _accept(self, followed: _Followed, event: events.Started) -> None:
        if not followed.is_accepted:
            followed.is_accepted = True
            answer = Accepted(event.job, event.attempt, event.seed, event.prompt_tokens)
            followed.door.tell(answer)


def _new_part(event: events.Tokens, followed: _Followed) -> list[Event]:
    """What the door does not know yet. An entry that it knows in part comes whole: text cannot be
    cut by token.
    """
    if event.last_seq <= followed.after:
        return []
    followed.after = event.last_seq
    return [Tokens(event.job, event.attempt, event.seq, event.ids, event.text)]


def _end_of(event: events.Done | events.Failed) -> Event:
    if isinstance(event, events.Failed):
        return Failed(event.job, event.attempt, event.seq, event.error)
    usage = Usage(**events.usage_to_map(event.usage))
    return Done(event.job, event.attempt, event.seq, event.reason, event.text, usage, event.crc)
