"""Tokens and ends of jobs -> reply streams: one pipeline a flush, entries with explicit ids.

A job's first token goes out at once; later ones share an entry for up to coalesce_ms or
coalesce_tokens. The end of a job takes its last tokens with it in one script. What a lost
connection left in doubt is looked up before anything else is written for that job, so nothing is
written twice and nothing is left out; what Redis itself lost is written again under the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from broker.messages import Tokens
from broker.streams.entries import read_top
from broker.streams.jobs import Chunk, Job, Stage
from broker.streams.lane import Command, LinkLost, Reply, ReplyError
from broker.streams.scripts import script
from broker.streams.state import (
    PAUSE_TOKENS,
    PROGRESS_TOKENS,
    RETRY_S,
    UNFINISHED_TTL_MS,
    DoorState,
)
from tokenbus.keys import CONTROL_MAX_LEN, GROUP

log = structlog.get_logger("broker.streams")

MAX_JOBS_PER_FLUSH = 512


class Outbox:
    """What waits to be written. One task, `run`, does all the writing, in order per job."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self._waiting: dict[Job, None] = {}
        self._wake = asyncio.Event()
        state.push = self.push

    def add(self, job: Job, event: Tokens) -> None:
        """Tokens of a running job. Raises RuntimeError on a hole: the ledger's fault."""
        if event.seq != job.next_seq:
            message = f"job {job.id}: tokens from seq {event.seq}, expected {job.next_seq}"
            raise RuntimeError(message)
        if not job.ids:
            job.due = job.last_flush + self._state.redis.coalesce_ms / 1000
        job.ids.extend(event.ids)
        job.texts.append(event.text)
        if len(job.ids) >= self._state.redis.coalesce_tokens:
            job.due = 0.0
            if len(job.ids) > PAUSE_TOKENS:
                self._state.pause(job, True)
        self._waiting[job] = None

    def push(self, job: Job) -> None:
        """The job has an ending, or is in doubt."""
        self._waiting[job] = None
        self._wake.set()

    def wake(self) -> None:
        """Look at what is due."""
        if self._waiting:
            self._wake.set()

    async def run(self) -> None:
        """Write what is due, for ever."""
        link = self._state.link
        while True:
            due = self._take_due()
            if not due:
                await self._wait()
                continue
            await link.up.wait()
            try:
                await self._flush(due)
            except LinkLost:
                for job in due:
                    job.in_doubt = True
                    self._waiting[job] = None
                await asyncio.sleep(0.01)
            for job in due:
                if self._state.jobs.is_held(job) and job.has_work:
                    self._waiting[job] = None

    # ------------------------------------------------------------ what is due

    def _take_due(self) -> list[Job]:
        now = self._state.now()
        due: list[Job] = []
        for job in list(self._waiting):
            if not self._state.jobs.is_held(job):
                del self._waiting[job]
            elif job.due <= now and len(due) < MAX_JOBS_PER_FLUSH:
                if job.stage is Stage.RUNNING and now >= job.lease_end:
                    # Not renewed in time: it may be another worker's by now. The ids would refuse
                    # what we write, but there is no use in computing more of it.
                    self._state.pause(job, True)
                    job.due = now + RETRY_S
                    continue
                del self._waiting[job]
                due.append(job)
        return due

    async def _wait(self) -> None:
        self._wake.clear()
        if not self._waiting:
            await self._wake.wait()
            return
        delay_s = min(job.due for job in self._waiting) - self._state.now()
        timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._wake.set)
        await self._wake.wait()
        timer.cancel()

    # ------------------------------------------------------------ writing

    async def _flush(self, jobs: Sequence[Job]) -> None:
        await self._settle_doubts([job for job in jobs if job.in_doubt])
        ready = [job for job in jobs if self._state.jobs.is_held(job) and not job.in_doubt]
        commands: list[Command] = []
        spans: list[tuple[Job, int]] = []
        now = self._state.now()
        for job in ready:
            batch = self._commands_for(job)
            if batch:
                job.last_flush = now
                spans.append((job, len(batch)))
                commands.extend(batch)
        replies = await self._state.link.run(commands)
        at, released = 0, 0
        for job, count in spans:
            released += self._take_replies(job, replies[at : at + count])
            at += count
        if released:  # so that other workers need not wait for their next look
            control = ("XADD", self._state.keys.control, "MAXLEN", "~", CONTROL_MAX_LEN, "*")
            await self._state.link.run([(*control, "op", "released", "worker", self._state.worker)])

    def _commands_for(self, job: Job) -> list[Command]:
        keys, ending = self._state.keys, job.ending
        if ending is not None and ending.is_discard:
            job.is_ending_sent = True
            return [self._discard(job, ending.dead_reason)]
        chunk = job.launch()
        if job.ids:  # behind a chunk that is sent again: the end comes with them
            ending = None
        job.is_ending_sent = ending is not None
        if ending is not None and ending.fields:
            return [self._finish(job, chunk)]
        commands: list[Command] = []
        if chunk is not None:
            out = keys.out(job.id)
            commands.append(("XADD", out, "NOMKSTREAM", chunk.entry_id, *chunk.fields()))
        if ending is not None:
            attempt = str(job.attempt) if job.attempt else ""
            args = (GROUP, self._state.worker, job.entry, attempt)
            commands.append(script("release", (keys.job(job.id), job.stream), args))
        return commands

    def _finish(self, job: Job, chunk: Chunk | None) -> Command:
        state, keys, ending, key = self._state, self._state.keys, job.ending, job.request
        assert ending is not None, f"job {job.id} has no ending"
        hash_key = keys.job(job.id)
        idem = hash_key
        if key.idempotency_key is not None:
            idem = keys.idempotency(key.tenant, key.idempotency_key)
        args: list[str | int] = [GROUP, job.entry, job.id, state.redis.reply_ttl_ms]
        if chunk is None:
            last_seq = job.written_seq
            args.extend((f"{job.attempt}-{last_seq + 1}", "", "", "", ""))
        else:
            last_seq = chunk.last_seq
            ids = ",".join(map(str, chunk.ids))
            args.extend((f"{job.attempt}-{last_seq + 1}", chunk.entry_id))
            args.extend((chunk.text, f"[{ids}]", chunk.seq))
        args.extend((ending.dead_reason, state.redis.dead_max_len, state.worker))
        args.extend((int(ending.frees_key), last_seq, *ending.fields))
        names = (hash_key, keys.out(job.id), job.stream, keys.dead, keys.cancel(job.id), idem)
        return script("finish", names, args)

    def _discard(self, job: Job, reason: str) -> Command:
        state = self._state
        args = (GROUP, state.worker, job.entry, job.id, reason, state.redis.dead_max_len)
        return script("discard", (job.stream, state.keys.dead), args)

    def _take_replies(self, job: Job, replies: Sequence[Reply]) -> int:
        """What the writes of one job led to. Returns 1 if it was released."""
        state = self._state
        first, last = replies[0], replies[-1]
        errors = [reply for reply in replies if isinstance(reply, ReplyError)]
        if b"fenced" in (first, last) or any(error.is_fenced for error in errors):
            state.lose(job, "another attempt has begun")
        elif errors:
            self._on_refused(job, errors[0])
        elif first is None or last == b"gone":
            job.in_doubt = True
        else:
            state.clear_trouble("publish")
            job.land()
            if not job.is_cleared and job.written_seq - job.base_seq >= PROGRESS_TOKENS:
                job.is_cleared = True
                state.next_suspect()
            state.pause(job, False)
            return self._close(job)
        return 0

    def _close(self, job: Job) -> int:
        """The job's writes were taken; if its ending was among them it leaves the door."""
        if not job.is_ending_sent or job.ending is None:
            return 0
        self._state.forget(job)
        self._state.counters.dead += bool(job.ending.dead_reason)
        if job.ending.is_discard:
            return 0
        if not job.ending.fields:
            self._state.counters.released += 1
            return 1
        self._state.counters.finished += 1
        return 0

    # ------------------------------------------------------------ after a loss

    async def _settle_doubts(self, jobs: Sequence[Job]) -> None:
        """Find out what each reply stream holds and make it hold what was written before."""
        fenced = [job for job in jobs if job.attempt and not _is_discard(job)]
        for job in jobs:
            if job not in fenced:  # nothing to write but a release, which may be repeated
                job.in_doubt = False
        queries = [
            ("XREVRANGE", self._state.keys.out(job.id), "+", "-", "COUNT", 1) for job in fenced
        ]
        for job, reply in zip(fenced, await self._state.link.run(queries), strict=True):
            try:
                if isinstance(reply, ReplyError):
                    raise reply
                await self._settle(job, reply)
            except ReplyError as error:
                self._on_refused(job, error)

    async def _settle(self, job: Job, reply: Reply) -> None:
        """reply: the last entry of the job's reply stream. Raises LinkLost or ReplyError."""
        attempt, seq, event = read_top(reply)
        if attempt > job.attempt:
            self._state.lose(job, "another attempt began while Redis was away")
        elif attempt == job.attempt and event in (b"done", b"error"):
            job.land()
            job.is_ending_sent = True
            job.in_doubt = False
            self._close(job)
        else:
            await self._compare(job, (attempt, seq))

    def _on_refused(self, job: Job, error: ReplyError) -> None:
        """Redis does not do what the job needs: nothing else is written for it until it does, or
        never where a key of the job itself is to blame.
        """
        if error.is_about_one_job and not _is_discard(job):
            self._state.discard(job, error)
            return
        job.in_doubt = True  # a script may have got half way
        job.due = self._state.now() + RETRY_S
        self._state.report_trouble("publish", error)

    async def _compare(self, job: Job, top: tuple[int, int]) -> None:
        last = job.log[-1] if job.log else None
        expected = (job.attempt, last.last_seq if last and last.attempt == job.attempt else 0)
        if top < expected:
            await self._restore(job)
        if job.flight is not None and top == (job.attempt, job.flight.last_seq):
            job.land()
        job.in_doubt = False

    async def _restore(self, job: Job) -> None:
        """Redis lost entries of this reply (emptied, or an old copy): write them again."""
        state = self._state
        before = sum(len(chunk.ids) for chunk in job.log if chunk.attempt < job.attempt)
        started = (
            *("event", "started", "attempt", str(job.attempt), "worker", state.worker),
            *("seed", str(job.seed), "prompt_tokens", str(job.prompt_tokens), "seq", str(before)),
        )
        entries = [(chunk.entry_id, chunk.fields()) for chunk in job.log]
        at = sum(1 for chunk in job.log if chunk.attempt < job.attempt)
        entries.insert(at, (f"{job.attempt}-0", started))
        args: list[str | int] = [state.worker, job.attempt, job.seed, UNFINISHED_TTL_MS]
        args.extend((job.prompt_tokens, f"{job.stream} {job.entry}"))
        for entry_id, fields in entries:
            args.extend((entry_id, len(fields), *fields))
        keys = (state.keys.job(job.id), state.keys.out(job.id))
        await state.link.call(*script("restore", keys, args))
        state.counters.restored += 1
        log.error("reply.restored", job=job.id, attempt=job.attempt, entries=len(entries))


def _is_discard(job: Job) -> bool:
    return job.ending is not None and job.ending.is_discard
