"""What the ledger tells the doors about itself: free places, and the state of the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from broker.ledger.job import Job
from broker.ledger.runs import Runs
from broker.messages import Address, Capacity, EngineState
from broker.metrics import Metrics


class Reports:
    """progress grows while the engine's loop lives. hang_ms: for so long an engine that is loading
    may be silent. Reads the ledger's tables; changes none.
    """

    def __init__(self, jobs: Mapping[str, Job], runs: Runs, metrics: Metrics, hang_ms: int) -> None:
        self._jobs = jobs
        self._runs = runs
        self._metrics = metrics
        self._doors: list[Address] = []
        self._slots = -1
        self._hang_s = hang_ms / 1000
        self._loading_at_s = -self._hang_s
        self.progress = 0
        self.engine_stats: dict[str, Any] | None = None

    def add_door(self, door: Address) -> None:
        """Tell this door too."""
        self._doors.append(door)

    def note_loading(self) -> None:
        """A sign of an engine that is on its way: the last one died, or this one reads weights."""
        self._loading_at_s = time.monotonic()

    def tell_capacity(self, is_draining: bool) -> None:
        """Send `Capacity` if it changed: enough jobs for the engine and as many in reserve."""
        runs = self._runs
        is_closed = is_draining or not runs.is_up or runs.is_ring_full
        slots = 0 if is_closed else max(0, 2 * runs.max_num_seqs - len(self._jobs))
        if slots != self._slots:
            self._slots = slots
            for door in self._doors:
                door.tell(Capacity(slots))

    def tell_state(self, suspects: tuple[str, ...] = ()) -> None:
        """Send `EngineState`."""
        num_running = len(self._runs.by_rid)
        state = EngineState(
            ready=self._runs.is_up,
            progress=self.progress,
            loading=not self._runs.is_up and time.monotonic() - self._loading_at_s < self._hang_s,
            suspects=suspects,
            num_queued=len(self._jobs) - num_running,
            num_running=num_running,
            engine=self.engine_stats,
            vitals=self._metrics.vitals(),
        )
        for door in self._doors:
            door.tell(state)
