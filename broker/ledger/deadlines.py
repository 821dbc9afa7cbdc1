"""The next deadline of many jobs. Knows names and times; one timer serves all."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from broker.actor import Actor


class Deadlines:
    """A heap with lazy removal; rebuilt when most of it is stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._due_ns: dict[str, int] = {}

    def add(self, job: str, deadline_ns: int) -> None:
        """Watch a job. One deadline a job."""
        self._due_ns[job] = deadline_ns
        heapq.heappush(self._heap, (deadline_ns, job))

    def remove(self, job: str) -> None:
        """Forget a job; nothing if it has no deadline."""
        if self._due_ns.pop(job, None) is not None and len(self._heap) > 64 + 2 * len(self._due_ns):
            self._heap = [(due, name) for name, due in self._due_ns.items()]
            heapq.heapify(self._heap)

    def next_ns(self) -> int | None:
        """When the next job is due."""
        heap = self._heap
        while heap and self._due_ns.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_ns: int) -> list[str]:
        """Jobs whose time is over; they are forgotten here."""
        due = []
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            job = heapq.heappop(self._heap)[1]
            del self._due_ns[job]
            due.append(job)
        return due


class DeadlineTimer:
    """One timer of an actor that is set for the next deadline."""

    def __init__(self, actor: Actor, deadlines: Deadlines, on_due: Callable[[], None]) -> None:
        self._actor = actor
        self._deadlines = deadlines
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def arm(self) -> None:
        """The deadlines may have changed."""
        next_ns = self._deadlines.next_ns()
        if next_ns is None or (self._timer and next_ns == self._armed_ns):
            return
        if self._timer is not None:
            self._actor.cancel_timer(self._timer)
        delay_s = max(0, next_ns - time.monotonic_ns()) / 1e9
        self._armed_ns = next_ns
        self._timer = self._actor.later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._on_due()
