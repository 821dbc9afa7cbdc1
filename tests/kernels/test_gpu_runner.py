"""The GPU runner as a whole: with and without graphs, one step ahead, without allocations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from tests.kernels.gpu_kit import VOCAB, Run, generate_ahead, interpret_graphs, make_runner
from tests.kernels.util import IS_NATIVE

RNG = np.random.default_rng(4)
RUNS = [
    Run(RNG.integers(0, VOCAB, 19).tolist(), Sampling()),
    Run(RNG.integers(0, VOCAB, 33).tolist(), Sampling(seed=9, temperature=0.8)),
]


class Watched:
    """A runner that notes, before every step, what was planned and how much was allocated."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.info = runner.info
        self.plans: list[StepPlan] = []
        self.allocations: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if IS_NATIVE:
            self.allocations.append(torch.cuda.memory_stats()["allocation.all.allocated"])
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        return self._runner.collect()


def test_tokens_are_the_same_with_and_without_graphs_for_prompts(monkeypatch, tmp_path) -> None:
    interpret_graphs(monkeypatch)
    runner = make_runner(tmp_path)
    graphs = runner._graphs

    def generate() -> list[list[int]]:
        return generate_ahead(runner, RUNS, 4, Scheduler(runner.info, enable_prefix_cache=False))

    without = generate()
    assert not any(kind == "prompt" for kind, *_ in graphs._graphs), "a prompt waited for a capture"
    while runner.prepare():
        pass
    assert any(kind == "prompt" for kind, *_ in graphs._graphs)
    assert generate() == without


@pytest.mark.gpu
@pytest.mark.skipif(not IS_NATIVE, reason="counts device allocations")
def test_decode_steps_allocate_nothing_on_the_device(tmp_path) -> None:
    runner = make_runner(tmp_path)
    while runner.prepare():
        pass
    watched = Watched(runner)
    scheduler = Scheduler(runner.info, enable_prefix_cache=False)
    generate_ahead(watched, RUNS, 60, scheduler)  # type: ignore[arg-type]
    decoding = [
        count
        for plan, count in zip(watched.plans, watched.allocations, strict=True)
        if plan.num_decode == len(plan.rows) and not plan.new_rows
    ]
    assert len(decoding) > 40
    assert decoding[-1] == decoding[4], "a decode step allocated device memory"
