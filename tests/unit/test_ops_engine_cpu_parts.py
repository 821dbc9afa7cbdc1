"""The clock of the CPU engine's parts: each second counts once, for the innermost part."""

from __future__ import annotations

import itertools

import pytest

from ops.bench import engine_cpu_parts
from ops.bench.engine_cpu_parts import PartClock


def test_the_time_of_an_inner_part_counts_for_the_inner_part_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()  # each reading is a second after the last
    monkeypatch.setattr(engine_cpu_parts.time, "perf_counter", lambda: float(next(ticks)))
    clock = PartClock()
    rotate = clock.timed("rotations before products", lambda x: x + 1)
    head = clock.timed("head", lambda x: rotate(rotate(x)))
    assert head(1) == 3
    rotate(0)
    taken = clock.take()
    assert taken["rotations before products"] == 3.0  # one second each
    assert taken["head"] == 3.0  # five, of which two were not its own
    assert sum(clock.take().values()) == 0.0


def test_every_part_has_functions_that_exist() -> None:
    clock = PartClock()
    with pytest.MonkeyPatch.context() as patch:
        wrapped: list[str] = []
        patch.setattr(clock, "timed", lambda part, function: wrapped.append(part) or function)
        engine_cpu_parts.install(clock)
    assert set(wrapped) == set(engine_cpu_parts._PARTS)
