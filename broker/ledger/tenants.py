"""How much of the engine one tenant may hold while others are about.

A flood that fills every row makes each newcomer wait until a row gets free. So when more than one
tenant was active of late, none may hold the last eighth of the rows; a worker with one tenant uses
them all.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

ACTIVE_S = 60.0  # a tenant that submitted nothing for so long is not about
RESERVED_PART = 8


class Tenants:
    """Runs by tenant, and who was active of late."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seen_s: OrderedDict[str, float] = OrderedDict()
        self._runs: Counter[str] = Counter()

    def seen(self, tenant: str) -> None:
        """A job of this tenant came."""
        self._seen_s[tenant] = self._clock_s()
        self._seen_s.move_to_end(tenant)

    def started(self, tenant: str) -> None:
        """A run of this tenant is in the engine."""
        self._runs[tenant] += 1

    def ended(self, tenant: str) -> None:
        """It is not any more."""
        self._runs[tenant] -= 1
        if self._runs[tenant] <= 0:
            del self._runs[tenant]

    def at_limit(self, max_num_seqs: int) -> str | None:
        """The tenant that may start no more runs now, or None."""
        if not self._runs:
            return None
        limit = max_num_seqs - max(1, max_num_seqs // RESERVED_PART)
        tenant, count = self._runs.most_common(1)[0] if len(self._runs) > 1 else self._only()
        return tenant if limit > 0 and count >= limit and self._are_others_about(tenant) else None

    def _only(self) -> tuple[str, int]:
        return next(iter(self._runs.items()))

    def _are_others_about(self, tenant: str) -> bool:
        oldest_s = self._clock_s() - ACTIVE_S
        while self._seen_s and next(iter(self._seen_s.values())) < oldest_s:
            self._seen_s.popitem(last=False)
        return any(other != tenant for other in self._seen_s)
