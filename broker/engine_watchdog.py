"""When an engine counts as hung: it is ready, but says nothing.

A live engine writes at least a STATS record each second, between two steps; so silence is one step
that takes very long, or for ever. Unless the broker itself stood still: a worker that is frozen as
a whole (`docker pause`, a suspended host) has heard nothing either. Knows times only.
"""

from __future__ import annotations

import os

STEP_FACTOR = 10  # and ten times the longest step seen is no hang either
LATE_S = 5.0  # so long after its last look the watchdog itself was asleep


class Watchdog:
    """Watches from READY on; loading may take as long as it takes."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._longest_step_s = 0.0
        self._heard_s: float | None = None
        self._looked_s = 0.0
        self.silent_s = 0.0

    def ready(self, now_s: float) -> None:
        """The engine is ready: watch it."""
        self._longest_step_s = 0.0
        self._heard_s = self._looked_s = now_s

    def heard(self, now_s: float) -> None:
        """A record came."""
        if self._heard_s is not None:
            self._heard_s = now_s

    def note_step(self, step_us: int) -> None:
        """How long a step took."""
        self._longest_step_s = max(self._longest_step_s, step_us / 1e6)

    def forget(self) -> None:
        """The engine is gone, or known to be hung."""
        self._heard_s = None

    def is_hung(self, now_s: float) -> bool:
        """Whether it has been silent for too long. To be asked often: who asks late begins anew."""
        looked_s, self._looked_s = self._looked_s, now_s
        if self._heard_s is None:
            return False
        if now_s - looked_s > LATE_S:
            self._heard_s = now_s
        self.silent_s = now_s - self._heard_s
        return self.silent_s > max(self._hang_s, STEP_FACTOR * self._longest_step_s)


def is_alive(pid: int) -> bool:
    """Whether the process still exists: an engine that merely closed its socket."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
