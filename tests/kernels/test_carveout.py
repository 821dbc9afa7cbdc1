"""The share of shared memory that a graph's kernels ask for, without a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import triton

from kernels import carveout
from kernels.carveout import shared_memory_share
from kernels.tiles import WIDE_HIDDEN, shared_percent


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    """(function, share) in the order in which they were asked for."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        carveout, "_share_setter", lambda: lambda function, share: found.append((function, share))
    )
    return found


def launch(function: int) -> None:
    """What Triton does before it launches a kernel."""
    triton.knobs.runtime.launch_enter_hook(SimpleNamespace(data={"function": function}))


def test_each_kernel_asks_once_and_is_set_back_in_the_end(monkeypatch, asked) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with shared_memory_share(50):
        for function in (7, 8, 7):
            launch(function)
        assert asked == [(7, 50), (8, 50)]
    assert sorted(asked[2:]) == [(7, -1), (8, -1)]
    launch(9)
    assert len(asked) == 4, "a kernel outside asked"


def test_nothing_is_asked_for_without_a_share_and_in_the_interpreter(monkeypatch, asked) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with shared_memory_share(None):
        launch(7)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with shared_memory_share(50):
        launch(7)
    assert asked == []


def test_few_rows_leave_memory_to_the_cache_where_products_are_small() -> None:
    assert shared_percent(1, WIDE_HIDDEN, 128) == 50
    assert shared_percent(8, WIDE_HIDDEN, 128) is None
    assert shared_percent(1, 576, 64) == 40
    assert shared_percent(8, 1024, 128) == 75
    assert shared_percent(8, 576, 64) == 50
    assert shared_percent(64, 576, 64) is None
