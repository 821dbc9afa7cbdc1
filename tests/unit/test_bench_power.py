"""The bench of kernels in steady state: what is counted, and what it says without NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from bench.gpu_power import FULL, TINY, MissingPackageError, NvmlMeter, Steady, kernels, steady


class Card:
    """A card with a clock: 20 us a call at first, 25 us when it is warm, at 500 W."""

    num_calls = 10

    def __init__(self) -> None:
        self.now_s = 0.0
        self.replays: list[int] = []
        self.rested_s = 0.0

    def run(self, count, meanwhile=None) -> float:
        us = 25.0 if self.replays else 20.0
        self.replays.append(count)
        self.now_s += count * self.num_calls * us / 1e6
        if meanwhile is not None:
            meanwhile()
        return us

    def joules(self) -> float:
        return 1000.0 + 500.0 * self.now_s

    def sm_mhz(self) -> int:
        return 1500 if len(self.replays) > 2 else 1980

    def rest(self, seconds: float) -> None:
        self.rested_s += seconds


def test_the_first_two_replays_are_cold_and_the_last_ones_count() -> None:
    card = Card()
    found = steady(card, card, 0.7, clock=lambda: card.now_s, rest=card.rest)
    assert card.rested_s > 0
    assert card.replays == [2, 1750, 3500]
    assert found == Steady(us=25.0, first_us=20.0, watts=500.0, sm_mhz=1500, mj=12.5)


def test_a_kernel_longer_than_the_time_runs_all_the_same() -> None:
    card = Card()
    steady(card, card, 0.0, clock=lambda: card.now_s, rest=card.rest)
    assert card.replays == [2, 1, 2]


def test_without_its_package_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingPackageError, match="pip install nvidia-ml-py"):
        NvmlMeter("GPU-1")


def test_energy_is_in_joules_and_of_the_named_card(monkeypatch) -> None:
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"card {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=lambda card: {"card GPU-1": 2500}[card],
        nvmlDeviceGetClockInfo=lambda card, what: {("card GPU-1", 1): 1755}[card, what],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = NvmlMeter("GPU-1")
    assert (meter.joules(), meter.sm_mhz()) == (2.5, 1755)


def test_products_of_ours_are_there_where_they_apply() -> None:
    names = set(kernels(FULL))
    assert {"decode_attention.b256", "copy", "prompt_attention.8x1024"} <= names
    for rows in (1, 8, 256, 8192):
        assert {f"gate_up.m{rows}.cublas", f"gate_up.m{rows}.fixed"} <= names
    fused = {name for name in names if name.endswith(".fused")}
    assert fused == {"gate_up.m1.fused", "gate_up.m8.fused"}
    assert len(kernels(TINY)) == 9
