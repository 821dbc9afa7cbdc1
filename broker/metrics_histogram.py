"""A histogram that takes many values at once: the counts of one batch are one numpy call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Histogram:
    """Counts by bucket. Written by one thread; a reader in another sees whole numbers, of which
    the newest batch may be half in.

    bounds: upper bounds, inclusive, ascending; what is above the last one is counted as well.
    """

    __slots__ = ("_bounds", "_counts", "_edges", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._edges = np.array(bounds, dtype=np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """float64 [N]: N values."""
        found = np.searchsorted(self._edges, values)
        counts = self._counts
        for index, count in enumerate(np.bincount(found).tolist()):
            if count:
                counts[index] += count
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it), `+Inf` last: what Prometheus wants."""
        total, buckets = 0, []
        names = [*(f"{bound:.6g}" for bound in self._bounds), "+Inf"]
        for name, count in zip(names, list(self._counts), strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets
