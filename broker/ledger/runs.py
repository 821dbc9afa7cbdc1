"""The ledger's view of the engine: which job runs under which rid, and how many more may.

Writes through the engine link; knows no queue and no events. A run that was aborted still occupies
the engine until it says so, and is counted until then.
"""

from __future__ import annotations

import time

from broker.ledger.job import Job, JobState
from broker.ledger.tenants import Tenants
from broker.link_messages import AbortRuns, EngineUp, PauseRuns, ResumeRuns, StartRun
from broker.messages import Address


def look_ahead(max_num_seqs: int) -> int:
    """Runs that wait inside the engine, so that a row that gets free is filled in the same step."""
    return max(2, max_num_seqs // 8)


class Runs:
    """rids count up for the life of the broker and are never used again."""

    def __init__(self, link: Address) -> None:
        self._link = link
        self._last_rid = 0
        self._closing: set[int] = set()  # aborted, not yet confirmed
        self._paused: dict[int, Job] = {}  # in the order of their pause
        self.by_rid: dict[int, Job] = {}
        self.tenants = Tenants()
        self.is_up = False
        self.is_ring_full = False
        self.max_num_seqs = 0

    @property
    def num_occupied(self) -> int:
        """Runs in the engine, those being aborted included."""
        return len(self.by_rid) + len(self._closing)

    @property
    def num_closing(self) -> int:
        """Places that get free as soon as the engine confirms an abort."""
        return len(self._closing)

    @property
    def num_free(self) -> int:
        """How many more runs the engine should get now."""
        if not self.is_up or self.is_ring_full:
            return 0
        return max(0, self.max_num_seqs + look_ahead(self.max_num_seqs) - self.num_occupied)

    def up(self, engine: EngineUp) -> None:
        """An engine is ready; it knows nothing of earlier runs."""
        self.is_up = True
        self.is_ring_full = False
        self.max_num_seqs = engine.max_num_seqs

    def gone(self) -> list[Job]:
        """The engine is gone: the jobs that were in it, in the order of their start."""
        jobs = list(self.by_rid.values())
        for job in jobs:
            job.rid = 0
            self.tenants.ended(job.tenant)
        self.by_rid.clear()
        self._closing.clear()
        self._paused.clear()
        self.is_up = False
        self.is_ring_full = False
        return jobs

    def start(self, job: Job, solo: bool) -> None:
        """QUEUED or SUSPECT -> RUNNING."""
        job.move(JobState.RUNNING)
        self._last_rid += 1
        job.rid = self._last_rid
        self.by_rid[job.rid] = job
        self.tenants.started(job.tenant)
        if not job.launched_ns:
            job.launched_ns = time.monotonic_ns()
        self._link.tell(StartRun(job.run_record(job.rid, solo)))

    def abort(self, job: Job) -> None:
        """Take the job out of the engine, if it is in it; its later tokens are dropped."""
        if not job.rid:
            return
        rid, job.rid = job.rid, 0
        del self.by_rid[rid]
        self.tenants.ended(job.tenant)
        self._paused.pop(rid, None)
        self._closing.add(rid)
        self._link.tell(AbortRuns((rid,)))

    def ended(self, rid: int) -> Job | None:
        """The engine ended this run: its job, or None if it was aborted before."""
        self._closing.discard(rid)
        self._paused.pop(rid, None)
        job = self.by_rid.pop(rid, None)
        if job is not None:
            job.rid = 0
            self.tenants.ended(job.tenant)
        return job

    def pause(self, job: Job) -> None:
        """The run keeps its place in the engine and computes nothing."""
        self._paused[job.rid] = job
        self._link.tell(PauseRuns((job.rid,)))

    def resume(self, job: Job) -> None:
        """Inverse of `pause`."""
        self._paused.pop(job.rid, None)
        self._link.tell(ResumeRuns((job.rid,)))

    def longest_paused(self) -> Job | None:
        """Who gives up its place when others wait."""
        return next(iter(self._paused.values()), None)
