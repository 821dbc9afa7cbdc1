"""Chooses how many threads compute a step, by what steps took.

More threads help a step only while every one of them has a core to itself: a product ends with its
last thread, and there are over a hundred products in a step. On two cores with other load a step of
25 ms took 400 with two threads. So a step gets all threads only if there are cores for them at that
moment, and if that was the faster way: the two choices, one thread and all of them, are tried
against each other, for steps of each size apart, and the slower one ever less often. The number of
threads changes no bits of a result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_FIRST_INTERVAL = 16  # steps between two trials
_LONGEST_INTERVAL = 512
_WEIGHT = 0.25  # of the newest time in an average
_ONE, _ALL = 0, 1


def cores_are_free(num_threads: int) -> bool:
    """Whether the machine runs so little else just now that each of our threads gets a core."""
    running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
    others = int(running) - 1
    return (os.cpu_count() or 1) - others >= num_threads


@dataclass(slots=True)
class _Kind:
    """Steps of about one size."""

    preferred: int = _ONE
    # Average of the preferred choice, last trial of the other; 0: not tried yet.
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    until_trial: int = 1
    interval: int = _FIRST_INTERVAL


class ThreadPacer:
    """Says how many threads the next step gets; told afterwards how long it took."""

    def __init__(self, num_threads: int, has_room: Callable[[], bool]) -> None:
        """has_room: whether that many cores are free now; asked before each step for all of
        them.
        """
        self._choices = (1, num_threads)
        self._has_room = has_room
        self._kinds: dict[int, _Kind] = {}
        self._is_held_back = False  # the step in question had to do with one thread

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of that many tokens."""
        if self._choices[_ALL] == 1:
            return 1
        kind = self._kinds.setdefault(num_tokens.bit_length(), _Kind())
        choice = self._choice(kind)
        self._is_held_back = choice == _ALL and not self._has_room()
        return 1 if self._is_held_back else self._choices[choice]

    def record(self, num_tokens: int, seconds: float) -> None:
        """The step that was asked for last took this long."""
        kind = self._kinds.get(num_tokens.bit_length())
        if kind is None or self._is_held_back:
            return
        if kind.until_trial:
            before, other = kind.seconds[kind.preferred], kind.seconds[1 - kind.preferred]
            average = before + _WEIGHT * (seconds - before) if before else seconds
            kind.seconds[kind.preferred] = average
            is_overtaken = 0.0 < other < average
            kind.until_trial = 0 if is_overtaken else kind.until_trial - 1
            return
        kind.seconds[1 - kind.preferred] = seconds
        better = _ALL if 0.0 < kind.seconds[_ALL] < kind.seconds[_ONE] else _ONE
        if better == kind.preferred:
            kind.interval = min(2 * kind.interval, _LONGEST_INTERVAL)
        else:
            kind.preferred, kind.interval = better, _FIRST_INTERVAL
        kind.until_trial = kind.interval

    def _choice(self, kind: _Kind) -> int:
        return kind.preferred if kind.until_trial else 1 - kind.preferred
