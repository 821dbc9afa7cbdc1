"""`python -m ops.bench.bus_stamps --config FILE ...`: a broker that notes when a message passes its
stations, for `bus_hops`. The notes go to the file that TOKENBUS_BENCH_STAMPS names, at the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from broker.__main__ import main
from broker.engine_link import EngineLink
from broker.gateway.actor import GatewayActor
from broker.gateway.jobs import Jobs
from broker.gateway.router import Router
from broker.ledger.actor import LedgerActor
from broker.ring.writer import RingWriter
from broker.text.actor import TextActor

# (class, method, station at its call, station at its return)
STATIONS: tuple[tuple[type, str, str, str], ...] = (
    (Router, "_read", "gateway_awake", ""),
    (GatewayActor, "_on_frames", "gateway_frame", ""),
    (TextActor, "handle", "text", ""),
    (Jobs, "_on_prepared", "gateway_prepared", ""),
    (LedgerActor, "_on_submit", "ledger_submit", ""),
    (EngineLink, "handle", "link_submit", ""),
    (RingWriter, "try_write", "", "ring_written"),
    (EngineLink, "_read_events", "link_awake", ""),
    (LedgerActor, "_on_steps", "ledger_steps", ""),
    (Jobs, "_on_publish", "gateway_publish", ""),
    (Router, "send", "router_send", "router_sent"),
)
NAMES = tuple(name for *_, before, after in STATIONS for name in (before, after) if name)


def wrapped(method: Callable[..., Any], before: int, after: int, notes: list[int]) -> Any:
    """The method, with a note (station, ns) at its call and its return; -1: none."""
    clock = time.perf_counter_ns

    def noted(*args: Any, **kwargs: Any) -> Any:
        if before >= 0:
            notes.append(before)
            notes.append(clock())
        result = method(*args, **kwargs)
        if after >= 0:
            notes.append(after)
            notes.append(clock())
        return result

    noted.__name__ = method.__name__
    return noted


def load(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Station -> sorted times in ns, as another process noted them."""
    notes = np.load(path).reshape(-1, 2)
    return {name: np.sort(notes[notes[:, 0] == i, 1]) for i, name in enumerate(NAMES)}


def run() -> int:
    """The broker with its stations noted."""
    notes: list[int] = []
    for owner, name, before, after in STATIONS:
        numbers = [NAMES.index(station) if station else -1 for station in (before, after)]
        setattr(owner, name, wrapped(getattr(owner, name), numbers[0], numbers[1], notes))
    try:
        return main()
    finally:
        with Path(os.environ["TOKENBUS_BENCH_STAMPS"]).open("wb") as file:
            np.save(file, np.array(notes, np.int64))


if __name__ == "__main__":
    sys.exit(run())
