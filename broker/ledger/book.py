"""The ledger's tables, and the changes of a job's state that keep them in step.

A job is in `jobs` until it ends, and in exactly one of: the queue, the engine's runs, the suspects,
or none of them while it is paused. Knows no messages of doors or engine.
"""

from __future__ import annotations

import time
from collections import Counter

from broker.config import QueueConfig
from broker.ledger.deadlines import Deadlines
from broker.ledger.job import Job, JobState
from broker.ledger.outbox import Outbox
from broker.ledger.runs import Runs
from broker.ledger.tally import Tally
from broker.ledger.trials import Trials
from broker.messages import Address, Done, Failed
from broker.queue import FairQueue


class Book:
    """Jobs and where they are."""

    def __init__(self, limits: QueueConfig, link: Address, tally: Tally) -> None:
        self.jobs: dict[str, Job] = {}
        self.num_by_door: Counter[Address] = Counter()  # of the jobs
        self.fetching: set[Address] = set()  # doors that bring what `Capacity` asked for
        self.queue = FairQueue(limits)
        self.runs = Runs(link)
        self.trials = Trials(limits.max_engine_kills)
        self.deadlines = Deadlines()
        self.outbox = Outbox()
        self.tally = tally

    def oldest_wait_s(self) -> float:
        """How long the oldest job in the queue has waited; 0 for an empty queue."""
        since_ns = [self.jobs[ticket.job].submitted_ns for ticket in self.queue.oldest()]
        return (time.monotonic_ns() - min(since_ns)) / 1e9 if since_ns else 0.0

    def named(self, name: str, door: Address | None, attempt: int) -> Job | None:
        """The job of that name, if it came from `door` (None: from any) and is that attempt (0:
        any).
        """
        job = self.jobs.get(name)
        if job is None or (door is not None and door is not job.door):
            return None
        return job if attempt in (0, job.attempt) else None

    def admit(self, job: Job) -> int:
        """A new job enters the queue; returns how many were before it. Raises Busy."""
        position = self.queue.admit(job.ticket(), limited=job.door not in self.fetching)
        self.jobs[job.name] = job
        self.num_by_door[job.door] += 1
        self.runs.tenants.seen(job.tenant)
        if job.deadline_ns is not None:
            self.deadlines.add(job.name, job.deadline_ns)
        return position

    def suspect(self, job: Job) -> None:
        """The job must run alone first."""
        self.queue.remove(job.name)
        job.move(JobState.SUSPECT)
        self.trials.add(job)

    def pause(self, job: Job) -> None:
        """Stop computing for the job; a run keeps its place in the engine while nobody needs it."""
        job.is_paused = True
        if job.state is JobState.RUNNING and job is not self.trials.current:
            self.runs.pause(job)
            return
        self.queue.remove(job.name)
        self.trials.remove(job, cleared=False)
        self.runs.abort(job)
        job.move(JobState.PAUSED)

    def unpause(self, job: Job) -> None:
        """Go on with the job, where it was."""
        job.is_paused = False
        if job.state is JobState.RUNNING:
            self.runs.resume(job)
        elif job.clear_at:
            self.suspect(job)
        else:
            self.requeue(job)

    def start_runs(self) -> None:
        runs, queue = self.runs, self.queue
        if self.trials:
            self._start_trial()
            return
        while len(queue) and runs.num_free:
            ticket = queue.pop(runs.tenants.at_limit(runs.max_num_seqs))
            if ticket is None:
                break
            runs.start(self.jobs[ticket.job], solo=False)
        if len(queue) > runs.num_closing and runs.is_up and not runs.num_free:
            self._evict_paused()

    def _start_trial(self) -> None:
        """The next suspect runs alone. Who runs now makes room: else all others would wait until
        the longest of them has ended.
        """
        runs = self.runs
        if self.trials.current is not None:
            return
        for job in list(runs.by_rid.values()):
            runs.abort(job)
            if job.is_paused:
                job.move(JobState.PAUSED)
            else:
                self.requeue(job)
        if runs.num_free and not runs.num_occupied:
            suspect = self.trials.next()
            if suspect is not None:
                runs.start(suspect, solo=True)

    def _evict_paused(self) -> None:
        """A paused run gives its place in the engine to a job that can use it."""
        job = self.runs.longest_paused()
        if job is not None:
            self.runs.abort(job)
            job.move(JobState.PAUSED)

    def clear(self, job: Job) -> None:
        """The job on trial is innocent: it goes back to the others, to run beside them."""
        self.trials.remove(job, cleared=True)
        self.runs.abort(job)
        self.requeue(job)

    def requeue(self, job: Job) -> None:
        job.move(JobState.QUEUED)
        self.queue.requeue(job.ticket())

    def end(self, job: Job, event: Done | Failed) -> None:
        """The one terminal event of a job."""
        if job.launched_ns and len(self.queue):
            self.queue.refund(job.ticket(), job.prepared.max_tokens - len(job.ids))
        self.outbox.add(job.door, event)
        self.forget(job)
        self.tally.add_end(job, event)

    def release(self, job: Job) -> None:
        """Give the job back to its door; another worker may take it, and nothing is charged."""
        self.outbox.release(job.door, job.name, job.attempt)
        self.forget(job)

    def forget(self, job: Job) -> None:
        self.runs.abort(job)
        self.queue.remove(job.name)
        self.trials.remove(job, cleared=True)
        self.deadlines.remove(job.name)
        job.move(JobState.ENDED)
        del self.jobs[job.name]
        self.num_by_door[job.door] -= 1
