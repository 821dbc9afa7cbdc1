"""Staying awake between messages that follow each other closely: when, for how long, for whom."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from broker.ring.spin import CROWDED_S, SpinGauge
from broker.spin import LoopSpin

SHORT_S, LONG_S = 50e-6, 5e-3


def gauge_after(*gaps_s: float, num_cores: int = 2) -> SpinGauge:
    gauge = SpinGauge(num_cores=num_cores)
    for gap_s in gaps_s:
        gauge.note(gap_s)
    return gauge


@pytest.mark.parametrize(
    ("gaps_s", "is_worth_it"),
    [
        ([], False),
        ([SHORT_S] * 3, False),
        ([SHORT_S] * 4, True),
        ([SHORT_S] * 4 + [LONG_S], False),
        ([SHORT_S] * 100 + [LONG_S], True),
        ([SHORT_S] * 100 + [LONG_S] * 2, False),
        ([SHORT_S, LONG_S] * 100, False),
    ],
)
def test_a_look_is_worth_it_while_most_gaps_are_short(
    gaps_s: list[float], is_worth_it: bool
) -> None:
    assert gauge_after(*gaps_s).is_worth_it is is_worth_it


def test_on_one_core_a_look_would_keep_the_others_from_running() -> None:
    assert not gauge_after(*[SHORT_S] * 100, num_cores=1).is_worth_it


class Log:
    """A spin that is worth it, and what it called."""

    def __init__(self, spin_s: float) -> None:
        self.calls: list[str] = []
        self.rested = asyncio.Event()
        gauge = SpinGauge(spin_s, num_cores=2)
        for _ in range(100):
            gauge.note(0.0)
        self.spin = LoopSpin(asyncio.get_running_loop(), gauge)
        self.spin.look = lambda: self.calls.append("look")
        self.spin.rest = self.rested.set


async def test_the_loop_turns_until_nothing_came_for_a_while_and_then_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: None)
    log = Log(spin_s=0.01)
    log.spin.heard()
    assert log.spin.is_awake
    async with asyncio.timeout(10):
        await log.rested.wait()
    assert not log.spin.is_awake
    assert log.calls


async def test_who_needs_the_core_ends_the_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(2 * CROWDED_S))
    log = Log(spin_s=60.0)
    log.spin.heard()
    async with asyncio.timeout(10):
        await log.rested.wait()
    assert log.calls == []


async def test_far_apart_messages_let_the_loop_sleep() -> None:
    spin = LoopSpin(asyncio.get_running_loop(), SpinGauge(num_cores=2))
    for _ in range(10):
        spin.heard()
        await asyncio.sleep(2e-3)
        assert not spin.is_awake
