"""From an entry to a running job: parse, prepare, fence, hand over.

Nothing is promised to the ledger before the fence script has taken the attempt in Redis. What the
script finds (ended before, another entry's, cancelled, too late, too many crashes) is final here.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import structlog

from broker.messages import Address, Cancel, Prepare, Prepared, PrepareFailed, Refused, Submit
from broker.streams.entries import failed_fields, fingerprint_of, flat, is_whole, job_id_of
from broker.streams.fence import fence_command, read_log, reject_command
from broker.streams.jobs import Ending, Job, Stage
from broker.streams.lane import Command, LinkLost, Reply, ReplyError
from broker.streams.state import RETRY_S, DoorState
from tokenbus.entries import event_to_entry
from tokenbus.errors import Internal, Poisoned, TokenbusError, Unsupported
from tokenbus.events import Done, Usage, read_reason
from tokenbus.fields import PRIORITIES
from tokenbus.parse import parse_entry
from tokenbus.request import JobRequest

log = structlog.get_logger("broker.streams")

MAX_PER_BATCH = 128
LOGS_AT_ONCE = 16
MAX_WAITING_SUSPECTS = 4
SEED_BITS = 53


class Pickup:
    """Jobs between the jobs stream and the ledger. `run` does the Redis part."""

    def __init__(self, state: DoorState, door: Address) -> None:
        self._state = state
        self._door = door
        self._to_fence: dict[Job, None] = {}
        self._to_reject: dict[Job, TokenbusError] = {}
        self._wake = asyncio.Event()
        self._seeds = random.Random()
        self._suspect: Job | None = None  # the one that may run
        self._suspects: deque[Job] = deque()

    # ------------------------------------------------------------ steps without Redis

    def take(self, stream: str, entry: str, fields: Sequence[bytes], asked_at: float) -> None:
        """An entry that is ours since `asked_at` or later."""
        state = self._state
        if (stream, entry) in state.jobs:
            return
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        refusal: TokenbusError | None = None
        try:
            request = parse_entry(values, entry)
            if request.have:
                raise Unsupported("have: the reply stream has a job's tokens here", field="have")
        except TokenbusError as error:
            refusal = error
            request = JobRequest(job=job_id_of(values, entry))
        # The stream an entry is in decides its priority.
        priority = PRIORITIES[state.streams.index(stream)]
        if request.priority != priority:
            request = replace(request, priority=priority)
        lease_end = state.new_lease_end(asked_at)
        job = Job(stream, entry, request, fingerprint_of(values), lease_end)
        state.jobs.add(job)
        if refusal is not None:
            self._reject(job, refusal)
        else:
            self._prepare(job)

    def on_prepared(self, message: Prepared) -> None:
        """The prompt is tokenized: on to the fence."""
        job = message.context
        if isinstance(job, Job) and self._state.jobs.is_held(job) and job.stage is Stage.READ:
            job.prepared = message
            self._fence_later(job)

    def on_prepare_failed(self, message: PrepareFailed) -> None:
        """The request cannot run on this model."""
        job = message.context
        if isinstance(job, Job) and self._state.jobs.is_held(job) and job.stage is Stage.READ:
            self._reject(job, message.error)

    def on_refused(self, job: Job, message: Refused) -> None:
        """The ledger does not want the job now (give it back) or ever (end it)."""
        if message.error.retry:
            self._state.end(job, Ending())
        else:
            self._state.end(job, Ending(failed_fields(message.error)))

    def release_unfenced(self, count: int | None = None) -> None:
        """Give back jobs for which no attempt has been taken: the `count` last read, or all."""
        jobs = [job for job in self._state.jobs if job.stage is Stage.READ]
        for job in jobs if count is None else jobs[-count:]:
            self._state.end(job, Ending())
        self._wake.set()

    def next_suspect(self) -> None:
        """A job has left, or got on; the next suspect may run if it was the one."""
        current = self._suspect
        if current is not None and (current.is_cleared or not self._state.jobs.is_held(current)):
            self._suspect = None
        while self._suspect is None and self._suspects:
            job = self._suspects.popleft()
            if self._state.jobs.is_held(job):
                self._suspect = job
                self._fence_later(job)

    def _prepare(self, job: Job) -> None:
        if not self._state.jobs.is_held(job) or job.stage is not Stage.READ:
            return
        if not self._state.text.tell(Prepare(job.request, self._door, job)):
            asyncio.get_running_loop().call_later(RETRY_S, self._prepare, job)

    def _fence_later(self, job: Job) -> None:
        job.stage = Stage.FENCING
        self._to_fence[job] = None
        self._wake.set()

    def _reject(self, job: Job, error: TokenbusError) -> None:
        job.stage = Stage.FENCING
        self._to_reject[job] = error
        self._wake.set()

    # ------------------------------------------------------------ steps in Redis

    async def run(self) -> None:
        """Fence and reject, in batches, for ever."""
        while True:
            await self._wake.wait()
            await self._state.link.up.wait()
            rejected, self._to_reject = self._to_reject, {}
            jobs = dict.fromkeys(list(self._to_fence)[:MAX_PER_BATCH])
            for job in jobs:
                del self._to_fence[job]
            if not rejected and not jobs:
                self._wake.clear()
                continue
            try:
                await self._run_batch(rejected, jobs)
            except LinkLost:
                await asyncio.sleep(0.01)
            # what the batch did not bring to an end is asked again
            self._to_reject.update(rejected)
            self._to_fence.update(jobs)

    async def _run_batch(self, rejected: dict[Job, TokenbusError], jobs: dict[Job, None]) -> None:
        """Takes out of `rejected` and `jobs` what got its answer. Raises LinkLost."""
        state = self._state
        if state.is_draining:
            for job in jobs:
                state.end(job, Ending())
            jobs.clear()
        batch = [*rejected, *jobs]
        commands = [reject_command(state, job, error) for job, error in rejected.items()]
        for job in jobs:
            commands.append(self._fence(job))
            job.was_asked = True
        answered = list(zip(batch, await state.link.run(commands), strict=True))
        for i in range(0, len(answered), LOGS_AT_ONCE):
            await self._take_replies(answered[i : i + LOGS_AT_ONCE], rejected, jobs)
        if rejected or jobs:
            await asyncio.sleep(RETRY_S)
        else:
            state.clear_trouble("pickup")

    async def _take_replies(
        self,
        answered: Sequence[tuple[Job, Reply]],
        rejected: dict[Job, TokenbusError],
        jobs: dict[Job, None],
    ) -> None:
        """Side by side, because logs are read for it: a worker that leaves gives many jobs at once.
        Raises LinkLost.
        """
        takes = [self._take_reply(job, reply, rejected.get(job)) for job, reply in answered]
        outcomes = await asyncio.gather(*takes, return_exceptions=True)
        failure: BaseException | None = None
        for (job, _), outcome in zip(answered, outcomes, strict=True):
            if isinstance(outcome, ReplyError) and outcome.is_about_one_job:
                self._state.discard(job, outcome)
            elif isinstance(outcome, ReplyError):
                self._state.report_trouble("pickup", outcome)
                continue
            elif outcome is not None:
                failure = outcome
                continue
            rejected.pop(job, None)
            jobs.pop(job, None)
        if failure is not None:
            raise failure

    async def _take_reply(self, job: Job, reply: Reply, refusal: TokenbusError | None) -> None:
        """Raises LinkLost or ReplyError."""
        if isinstance(reply, ReplyError):
            raise reply
        if refusal is not None:
            self._take_rejection(job, refusal)
        elif self._state.jobs.is_held(job):
            await self._take_verdict(job, reply)

    def _fence(self, job: Job) -> Command:
        seed = job.request.params.seed
        offer = self._seeds.getrandbits(SEED_BITS) if seed is None else seed
        return fence_command(self._state, job, offer, may_be_suspect=job is self._suspect)

    def _take_rejection(self, job: Job, error: TokenbusError) -> None:
        log.info("job.rejected", job=job.id, code=error.code, field=error.field)
        self._state.counters.rejected += 1
        self._state.counters.refused[error.code] += 1
        self._state.forget(job)

    async def _take_verdict(self, job: Job, reply: Reply) -> None:
        """Raises LinkLost or ReplyError; then the job may be asked for again."""
        state, verdict = self._state, reply[0].decode()
        if verdict == "suspect":
            self._hold_suspect(job)
        elif verdict in ("run", "cancelled", "deadline", "dead", "emptied"):
            job.attempt, job.seed, seq, crashes = (int(value) for value in reply[1:5])
            self._name(job)
            chunks = await read_log(state, job) if seq else []
            if not state.jobs.is_held(job):
                return  # lost meanwhile
            if is_whole(chunks, seq):
                job.log = chunks
                self._begin(job, verdict, crashes, None if reply[5] == b"" else int(reply[5]))
            else:
                self._fail(job, Internal(f"the reply stream has lost some of {seq} tokens"))
        else:
            log.info("job.not_run", job=job.id, entry=job.entry, why=verdict)
            if verdict in ("duplicate", "conflict", "taken"):
                state.counters.duplicates += 1
            state.forget(job)

    def _name(self, job: Job) -> None:
        """The id is this entry's now: an earlier entry of this id that we still run was deleted."""
        earlier = self._state.jobs.by_id(job.id)
        if earlier is not None and earlier is not job:
            self._state.lose(earlier, "another entry has the job now")
        self._state.jobs.name(job)

    def _hold_suspect(self, job: Job) -> None:
        job.was_asked = False
        if len(self._suspects) < MAX_WAITING_SUSPECTS:
            self._suspects.append(job)
            self.next_suspect()
        else:
            self._state.end(job, Ending())

    def _begin(self, job: Job, verdict: str, crashes: int, left_ms: int | None) -> None:
        state = self._state
        say = log.info if job.attempt > 1 else log.debug
        say("job.taken", job=job.id, attempt=job.attempt, crashes=crashes, verdict=verdict)
        if verdict == "dead":
            died = f"the worker died {crashes} times while it ran this job"
            self._fail(job, Poisoned(died), dead=True)
        elif verdict == "emptied":
            self._fail(job, Internal("the reply stream was emptied while the job ran"))
        elif state.is_draining:
            state.end(job, Ending())
        elif (verdict != "run" or job.is_cancelled) and not job.log:
            reason = read_reason("deadline" if verdict == "deadline" else "cancelled")
            done = Done(job.id, job.attempt, 0, reason, "", Usage(job.prompt_tokens), 0)
            state.end(job, Ending(flat(event_to_entry(done))))
        else:
            self._submit(job, crashes > 1, left_ms)
            if verdict == "cancelled" or job.is_cancelled:
                state.tell_ledger(Cancel, job)

    def _submit(self, job: Job, solo: bool, left_ms: int | None) -> None:
        deadline_ns = None
        if left_ms is not None:
            deadline_ns = time.monotonic_ns() + left_ms * 1_000_000
        prefix = tuple(job.output_ids())
        assert job.prepared is not None, f"job {job.id} is fenced but not prepared"
        job.stage = Stage.RUNNING
        job.base_seq = job.written_seq
        message = Submit(job.prepared, self._door, job.attempt, job.seed, prefix, deadline_ns, solo)
        if not self._state.ledger.tell(message):
            self._state.end(job, Ending())

    def _fail(self, job: Job, error: TokenbusError, *, dead: bool = False) -> None:
        reason = error.message if dead else ""
        self._state.end(job, Ending(failed_fields(error), reason, error.retry))
