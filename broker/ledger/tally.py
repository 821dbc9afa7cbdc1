"""What is counted and logged about jobs and steps, kept until the doors have had their turn: nobody
waits for a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.ledger.job import Job
from broker.ledger.job_log import log_end
from broker.messages import Done, Failed
from broker.metrics import Metrics
from broker.ring.records import StepEvents


class Tally:
    """`flush` counts what the others collected."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps: list[StepEvents] = []
        self._begun: list[Job] = []
        self._ended: list[tuple[Job, Done | Failed]] = []

    def __bool__(self) -> bool:
        return bool(self._steps or self._begun or self._ended)

    def add_steps(self, steps: Sequence[StepEvents]) -> None:
        """Steps of the engine, in order."""
        self._steps.extend(steps)

    def add_first_token(self, job: Job) -> None:
        """A job got its first token."""
        self._begun.append(job)

    def add_end(self, job: Job, event: Done | Failed) -> None:
        """A job's terminal event."""
        self._ended.append((job, event))

    def flush(self) -> None:
        """Count everything, and write the line of each job that ended."""
        steps, self._steps = self._steps, []
        if steps:
            self._metrics.take_steps(steps)
        begun, self._begun = self._begun, []
        for job in begun:
            self._metrics.first_token(job)
        ended, self._ended = self._ended, []
        for job, event in ended:
            self._metrics.job_ended(job, event)
            log_end(job, event, self._metrics.door_of(job.door))
