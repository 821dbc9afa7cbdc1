"""Chooses how many threads compute a step, by what steps took.

More threads help a step only while every one of them has a core to itself: a product ends with its
last thread, and there are over a hundred products in a step. On two cores with other load a step of
25 ms took 400 with two threads. So the two choices, one thread and all of them, are tried against
each other, for prompts and decode steps of each size apart, and the slower one ever less often. The
number of threads changes no bits of a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_INTERVAL = 16  # steps between two trials
_LONGEST_INTERVAL = 512
_WEIGHT = 0.25  # of the newest time in an average
_ONE, _ALL = 0, 1


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

    def __init__(self, num_threads: int) -> None:
        self._choices = (1, num_threads)
        self._kinds: dict[int, _Kind] = {}

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of that many tokens."""
        if self._choices[_ALL] == 1:
            return 1
        kind = self._kinds.setdefault(num_tokens.bit_length(), _Kind())
        return self._choices[self._choice(kind)]

    def record(self, num_tokens: int, seconds: float) -> None:
        """The step that was asked for last took this long."""
        kind = self._kinds.get(num_tokens.bit_length())
        if kind is None:
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
