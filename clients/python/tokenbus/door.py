"""What the clients ask of a door, and the settings both doors share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenbus.events import JobStatus
from tokenbus.request import JobRequest
from tokenbus.stream import Job


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect_s: until the first contact. answer_s: for one answer of a live peer.

    give_up_s: how long a running job survives without any contact before it fails with
    BusUnavailable.
    """

    connect_s: float = 10.0
    answer_s: float = 10.0
    give_up_s: float = 60.0


class Door(Protocol):
    """A way to the workers. All methods belong to one event loop."""

    async def open(self, request: JobRequest) -> Job:
        """Send a job and follow it. The job's `accepted` says when it was taken."""
        ...

    async def tail(self, name: str, after: int) -> Job:
        """Follow a job from the token after seq `after`, wherever it was submitted."""
        ...

    async def cancel(self, name: str) -> None:
        """Ask for a job's end; its stream gets the one terminal event."""
        ...

    async def status(self, name: str) -> JobStatus:
        """Where a job stands. Raises UnknownJob."""
        ...

    def forget(self, job: Job) -> None:
        """Stop following without a word to the worker."""
        ...

    def abandon(self, job: Job) -> None:
        """Stop following; cancel the job if it was opened here and has not ended."""
        ...

    async def close(self) -> None:
        """End every stream with BusUnavailable and free the connections."""
        ...
