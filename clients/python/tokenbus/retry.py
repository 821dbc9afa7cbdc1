"""Waiting times between attempts."""

from __future__ import annotations

import random


class Backoff:
    """0.1, 0.2, 0.4 ... seconds up to a limit, each within 25 %; `reset` after a success."""

    def __init__(self, first_s: float = 0.1, limit_s: float = 10.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now."""
        wait_s = self._next_s * random.uniform(0.75, 1.25)
        self._next_s = min(self._next_s * 2, self._limit_s)
        return wait_s

    def reset(self) -> None:
        """Start again from the first."""
        self._next_s = self._first_s
