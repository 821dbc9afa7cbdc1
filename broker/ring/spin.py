"""When a side that waits does better to look for a moment than to sleep.

A core that sleeps takes tens of microseconds to come back, and then finds its caches cold: the same
code takes two to four times as long. Where messages follow each other closely, looking costs less
than sleeping. Where they come every few milliseconds, it costs a core and gains nothing. So the
gauge goes by what came before: it is worth it while most gaps were shorter than the look.
"""

from __future__ import annotations

import os
from typing import Final

#: How long to look before sleeping. Longer than the answer to a message takes between processes.
SPIN_S: Final = 400e-6
#: A yield of the core that takes longer shows that the core is wanted: then it is better to sleep,
#: and to wake on one that is free. An undisturbed yield takes half a microsecond.
CROWDED_S: Final = 15e-6
_MOST = 8
_ENOUGH = 4
_LONG_GAP = 4  # so many short gaps make up for a long one


class SpinGauge:
    """Counts short gaps against long ones. Never worth it on one core: it would keep what is waited
    for from running.
    """

    __slots__ = ("_has_cores", "_score", "spin_s")

    def __init__(self, spin_s: float = SPIN_S, num_cores: int = 0) -> None:
        """num_cores: that this process may use; 0: what the system says."""
        self.spin_s = spin_s
        self._has_cores = (num_cores or len(os.sched_getaffinity(0))) > 1
        self._score = 0

    def note(self, gap_s: float) -> None:
        """What was waited for came after gap_s."""
        if gap_s < self.spin_s:
            self._score = min(self._score + 1, _MOST)
        else:
            self._score = max(self._score - _LONG_GAP, 0)

    @property
    def is_worth_it(self) -> bool:
        """Whether the next wait should begin with a look of spin_s."""
        return self._has_cores and self._score >= _ENOUGH
