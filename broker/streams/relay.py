"""Jobs of the other door that go through Redis: put them in, look them up, cancel them, and have
their replies followed. The other door hears what the ledger would tell it, whoever runs the job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

from broker.messages import (
    Find,
    Follow,
    Found,
    Refused,
    SubmitDurable,
)
from broker.streams.entries import fingerprint_of, flat, last_seq_of
from broker.streams.followed import FollowedReplies
from broker.streams.lane import Command, LinkLost, Reply, ReplyError
from broker.streams.scripts import script
from broker.streams.state import RETRY_S, DoorState
from tokenbus.errors import Busy, Conflict, TokenbusError
from tokenbus.keys import CANCEL_TTL_S, CONTROL_MAX_LEN
from tokenbus.parse import build_entry
from tokenbus.request import JobRequest

MAX_PER_BATCH = 128
MAX_WAITING = 10_000  # jobs, or questions, on their way to Redis
BUSY_RETRY_MS = 1_000


class Relay:
    """Two tasks: one writes jobs and wishes, one (`followed.run`) reads reply streams."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self.followed = FollowedReplies(state)
        self._to_submit: deque[SubmitDurable] = deque()
        self._expected: set[str] = set()  # submitted, and to be followed when Redis has them
        self._to_cancel: deque[str] = deque()
        self._to_find: deque[Find] = deque()
        self._wake_writer = asyncio.Event()

    # ------------------------------------------------------------ messages

    def submit(self, message: SubmitDurable) -> None:
        """A new job; refused where the queue in Redis is full, or out of reach."""
        if not self._can_reach() or len(self._to_submit) >= MAX_WAITING:
            message.door.tell(Refused(message.request.job, _out_of_reach()))
            return
        self._to_submit.append(message)
        self._expected.add(message.request.job)
        self._wake_writer.set()

    def find(self, message: Find) -> None:
        """Look a job up."""
        if not self._can_reach() or len(self._to_find) >= MAX_WAITING:
            message.door.tell(Found(message.job, message.context, error=_out_of_reach()))
            return
        self._to_find.append(message)
        self._wake_writer.set()

    def follow(self, message: Follow) -> None:
        """A job that is in Redis."""
        self.followed.add(message.job, message.door, message.after)
        self._wake_writer.set()  # which unblocks the reader

    def cancel(self, job: str) -> None:
        """Ask whoever runs the job to end it; the end comes as an event."""
        self._to_cancel.append(job)
        self._wake_writer.set()

    def pause(self, job: str, wanted: bool) -> None:
        """Read no more of this stream for now, or again."""
        if self.followed.pause(job, wanted):
            self._wake_writer.set()

    def drop(self, job: str) -> None:
        """Nobody follows the job any more; it runs on."""
        self.followed.drop(job)
        self._expected.discard(job)

    def on_unreachable(self) -> None:
        """The first connection failed: what waited for it is answered."""
        submits, self._to_submit = self._to_submit, deque()
        finds, self._to_find = self._to_find, deque()
        for message in submits:
            self._expected.discard(message.request.job)
            message.door.tell(Refused(message.request.job, _out_of_reach()))
        for question in finds:
            question.door.tell(Found(question.job, question.context, error=_out_of_reach()))

    def _can_reach(self) -> bool:
        """Redis is there, or will be at once: clients of a broker that was started again are often
        faster than its first connection.
        """
        return self._state.link.up.is_set() or self._state.link.is_starting

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
        """Everything that waits, in batches; what got its answer leaves its queue. Raises LinkLost
        or ReplyError.
        """
        link, keys = self._state.link, self._state.keys
        while self._to_submit:
            await self._submit_batch()
        while self._to_cancel:
            job = self._to_cancel[0]
            await link.call("SET", keys.cancel(job), 1, "EX", CANCEL_TTL_S)
            add = ("XADD", keys.control, "MAXLEN", "~", CONTROL_MAX_LEN, "*")
            await link.call(*add, "op", "cancel", "job", job)
            self._to_cancel.popleft()
        while self._to_find:
            await self._find_batch()
        if link.relay_id:
            await link.call("CLIENT", "UNBLOCK", link.relay_id)

    async def _submit_batch(self) -> None:
        commands: list[Command] = []
        batch: list[SubmitDurable] = []
        while self._to_submit and len(batch) < MAX_PER_BATCH:
            message = self._to_submit.popleft()
            try:
                commands.append(self._submit_command(message.request))
            except TokenbusError as error:  # it fits a message of the other door, but no entry
                message.door.tell(Refused(message.request.job, error))
                continue
            batch.append(message)
        try:
            replies = await self._state.link.run(commands)
        except LinkLost:
            self._to_submit.extendleft(reversed(batch))
            raise
        for message, reply in zip(batch, replies, strict=True):
            job = message.request.job
            refusal = _refusal(job, reply)
            if refusal is not None:
                message.door.tell(Refused(job, refusal))
            elif job in self._expected:
                self.follow(Follow(job, message.door))
            self._expected.discard(job)

    def _submit_command(self, request: JobRequest) -> Command:
        """Raises a TokenbusError for what no entry can hold."""
        state = self._state
        fields = build_entry(request)
        fields.pop("durable", None)  # it is now
        fields.pop("priority", None)  # the stream says it
        mark = fingerprint_of({name.encode(): value.encode() for name, value in fields.items()})
        names = (state.keys.job(request.job), state.keys.jobs(request.priority), *state.streams)
        args: list[str | int] = [state.redis.queue_limit, mark, *flat(fields)]
        return script("submit", names, args)

    async def _find_batch(self) -> None:
        keys = self._state.keys
        batch = list(islice(self._to_find, MAX_PER_BATCH))
        commands: list[Command] = []
        for message in batch:
            commands.append(("HGETALL", keys.job(message.job)))
            commands.append(("XREVRANGE", keys.out(message.job), "+", "-", "COUNT", 1))
        replies = await self._state.link.run(commands)
        for message, about, last in zip(batch, replies[::2], replies[1::2], strict=True):
            self._to_find.popleft()
            refused = next((r for r in (about, last) if isinstance(r, ReplyError)), None)
            if refused is not None:
                busy = Busy(f"Redis: {refused}"[:512], retry_ms=BUSY_RETRY_MS)
                message.door.tell(Found(message.job, message.context, error=busy))
                continue
            values = [value.decode(errors="replace") for value in about]
            fields = dict(zip(values[::2], values[1::2], strict=True)) if last or about else None
            message.door.tell(Found(message.job, message.context, fields, last_seq_of(last)))


def _out_of_reach() -> Busy:
    return Busy("Redis cannot be reached now", retry_ms=BUSY_RETRY_MS)


def _refusal(job: str, verdict: Reply) -> TokenbusError | None:
    """What the submit script, or the server, has against a job."""
    if isinstance(verdict, ReplyError):
        return Busy(f"Redis refuses the job: {verdict}"[:512], retry_ms=BUSY_RETRY_MS)
    if verdict == b"busy":
        return Busy("the queue in Redis is full", retry_ms=BUSY_RETRY_MS)
    if verdict == b"conflict":
        return Conflict(f"job {job!r} is another request in Redis", field="job")
    return None
