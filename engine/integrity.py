"""Checks that rows, blocks and steps in flight agree with each other; run when idle and after
every test step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.block_manager import BlockManager
from engine.errors import IntegrityError
from engine.flight import Flight
from engine.rows import Phase, RowTable


def check_books(t: RowTable, blocks: BlockManager, flights: Iterable[Flight]) -> None:
    """Raise IntegrityError naming the first difference."""
    seated = [row for row in range(t.num_rows) if t.requests[row] is not None]
    blocks.check_integrity([t.blocks_of(row) for row in seated])
    live = {row for row in seated if not t.ended[row]}
    if set(t.row_of.values()) != live or len(seated) + t.num_free != t.num_rows:
        raise IntegrityError(
            f"{len(live)} live rows, {len(t.row_of)} named, {t.num_free} free of {t.num_rows}"
        )
    in_flight = np.zeros(t.num_rows, np.int32)
    for flight in flights:
        in_flight[flight.plan.rows] += 1
    if (in_flight != t.in_flight).any():
        raise IntegrityError("in-flight counts of the rows differ from the steps in flight")
    stuck = t.ended & (t.in_flight == 0)
    if stuck.any():
        raise IntegrityError(f"row {int(np.flatnonzero(stuck)[0])} ended and was not freed")
    runnable = t.decodable & ((t.phase != Phase.DECODE) | t.paused | t.losing_kv)
    if runnable.any():
        raise IntegrityError(
            f"row {int(np.flatnonzero(runnable)[0])} is marked to decode and cannot"
        )
    if (t.num_blocks * t.block_size != t.capacity).any():
        raise IntegrityError("capacities of the rows differ from their block counts")
