"""What the ledger tells the doors about itself: free places, and the state of the engine."""

from __future__ import annotations

import time
from typing import Any

from broker.ledger.book import Book
from broker.messages import Address, Capacity, EngineState
from broker.metrics import Metrics


class Reports:
    """progress grows while the engine's loop lives. hang_ms: for so long an engine that is loading
    may be silent. Reads the ledger's tables; changes none.
    """

    def __init__(self, book: Book, metrics: Metrics, hang_ms: int) -> None:
        self._book = book
        self._metrics = metrics
        self._doors: list[Address] = []
        self._slots: dict[Address, int] = {}  # as told to the doors that fetch
        self._hang_s = hang_ms / 1000
        self._loading_at_s = -self._hang_s
        self.progress = 0
        self.engine_stats: dict[str, Any] | None = None

    def add_door(self, door: Address) -> None:
        """Tell this door too."""
        self._doors.append(door)
        if door in self._book.fetching:
            self._slots[door] = -1

    def note_loading(self) -> None:
        """A sign of an engine that is on its way: the last one died, or this one reads weights."""
        self._loading_at_s = time.monotonic()

    def tell_capacity(self, is_draining: bool) -> None:
        """Send `Capacity` if it changed: enough jobs for the engine and as many in reserve. A
        door may always have as many here as the engine has rows, whatever the others bring.
        """
        runs, book = self._book.runs, self._book
        is_closed = is_draining or not runs.is_up or runs.is_ring_full
        rows = 0 if is_closed else runs.max_num_seqs
        for door, told in self._slots.items():
            slots = max(0, 2 * rows - len(book.jobs), rows - book.num_by_door[door])
            if slots != told:
                self._slots[door] = slots
                door.tell(Capacity(slots))

    def tell_state(self, suspects: tuple[str, ...] = ()) -> None:
        """Send `EngineState`."""
        runs = self._book.runs
        num_running = len(runs.by_rid)
        state = EngineState(
            ready=runs.is_up,
            progress=self.progress,
            loading=not runs.is_up and time.monotonic() - self._loading_at_s < self._hang_s,
            suspects=suspects,
            num_queued=len(self._book.jobs) - num_running,
            num_running=num_running,
            engine=self.engine_stats,
            vitals=self._metrics.vitals(),
        )
        for door in self._doors:
            door.tell(state)
