"""What the supervisor is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# ---------------------------------------------------------------- to it


@dataclass(frozen=True, slots=True)
class Start:
    """Start this child now."""

    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child ended. returncode as in subprocess: negative for a signal."""

    name: str
    pid: int
    returncode: int


@dataclass(frozen=True, slots=True)
class StatusLine:
    """One JSON object from a child's status pipe."""

    name: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain and stop; a second one does not wait for running jobs."""

    why: str


# ---------------------------------------------------------------- from it


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker takes jobs. The first time, and again after each restart of a process."""

    data: dict[str, Any]
    pids: dict[str, int]
    is_first: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """What the broker says while the worker is not ready: loading, not ready and why."""

    data: dict[str, Any]


WorkerEvent = Ready | Progress
