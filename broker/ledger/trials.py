"""Finding the job that kills the engine, among all that were in it.

When the engine dies, every job in it is a suspect with one strike. Before anything else runs, the
suspects run alone, one after another, each until it has got past the point of the crash
(`CLEAR_TOKENS` more tokens than were seen before it) or has ended: then it is cleared, its strikes
are forgotten, and it goes back to the others. Who is alone when the engine dies again gets another
strike; at `max_kills` it is poison. So the guilty job kills the engine at most `max_kills` times,
its neighbours are never charged, and a job that an outside kill hits now and then is cleared by
its progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.ledger.job import Job

CLEAR_TOKENS = 4  # an engine runs up to two steps ahead of what was seen; twice that


class Trials:
    """Suspects in line, and the one on trial. Runs nothing itself."""

    def __init__(self, max_kills: int) -> None:
        self._max_kills = max_kills
        self._line: dict[str, Job] = {}
        self.current: Job | None = None

    def __bool__(self) -> bool:
        """Whether anybody is suspected: nothing else may run meanwhile."""
        return self.current is not None or bool(self._line)

    def accuse(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """These were in the engine when it died. Returns (poison, suspects)."""
        self.current = None
        poison, suspects = [], []
        for job in jobs:
            job.strikes += 1
            if job.strikes >= self._max_kills:
                poison.append(job)
            else:
                self.add(job)
                suspects.append(job)
        return poison, suspects

    def add(self, job: Job) -> None:
        """Put one suspect into the line."""
        job.clear_at = len(job.ids) + CLEAR_TOKENS
        self._line[job.name] = job

    def next(self) -> Job | None:
        """The suspect to run alone now; None if one runs, or nobody is left."""
        if self.current is not None or not self._line:
            return None
        name = next(iter(self._line))
        self.current = self._line.pop(name)
        return self.current

    def is_cleared(self, job: Job) -> bool:
        """Whether the job on trial has got past the crash."""
        return job is self.current and len(job.ids) >= job.clear_at

    def remove(self, job: Job, cleared: bool) -> None:
        """The job is no suspect any more, or (not cleared) does not run for now."""
        self._line.pop(job.name, None)
        if self.current is job:
            self.current = None
        if cleared:
            job.strikes = job.clear_at = 0

    def waiting(self) -> list[Job]:
        """Suspects that wait for their trial."""
        return list(self._line.values())
