"""The GPU runner as a whole: with and without graphs, one step ahead, without allocations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.errors import IntegrityError
from engine.gpu import graph_cache
from engine.gpu.captured import CapturedStep
from engine.gpu.memory import StepLimits
from engine.gpu.row_tables import SampleKind
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
    """A runner that notes, before every step, what was planned and how much was allocated, and
    then what took it: an eager step or the graph of some size."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.info = runner.info
        self.plans: list[StepPlan] = []
        self.allocations: list[int] = []
        self.ways: list[str] = []
        self._find, runner._graphs.find = runner._graphs.find, self._note

    def _note(self, *args: Any) -> Any:
        graph = self._find(*args)
        size = getattr(graph, "size", None) or getattr(graph, "num_tokens", "")
        self.ways.append(f"{type(graph).__name__}{size}")
        return graph

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if IS_NATIVE:
            self.allocations.append(torch.cuda.memory_stats()["allocation.all.allocated"])
        self._runner.launch(plan)
        assert self._runner._slots.next_step == len(self.plans)
        if not IS_NATIVE:  # where every launch ends before it returns
            assert self._runner._slots.count.item() == len(self.plans)

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


def test_captured_steps_of_many_rows_that_mix_prompts_and_decoding_give_the_same_tokens(
    monkeypatch, tmp_path
) -> None:
    interpret_graphs(monkeypatch)
    lengths = RNG.integers(3, 10, 10)
    runs = [Run(RNG.integers(0, VOCAB, length).tolist(), Sampling()) for length in lengths]
    options: dict[str, Any] = {"deterministic": False, "limits": StepLimits(16, 32, 64, 16)}
    expected = generate_ahead(make_runner(tmp_path, **options), runs, 3)
    monkeypatch.setattr(graph_cache, "_PATIENCE", 1)
    watched = Watched(make_runner(tmp_path, **options))
    assert generate_ahead(watched, runs, 3) == expected  # type: ignore[arg-type]
    mixed = [
        way
        for plan, way in zip(watched.plans, watched.ways, strict=True)
        if 0 < plan.num_decode < len(plan.rows) and len(plan.rows) > 8
    ]
    assert mixed
    assert all(way.startswith("PromptGraph") for way in mixed)


def test_eager_steps_and_graphs_of_any_size_share_the_slots(monkeypatch, tmp_path) -> None:
    """Runs that end one after the other, each step a step ahead, graphs captured in between."""
    interpret_graphs(monkeypatch)
    runs = [*RUNS, Run(RNG.integers(0, VOCAB, 40).tolist(), Sampling(seed=2, temperature=1.1))]
    plain = make_runner(tmp_path)
    alone = [generate_ahead(plain, [run], 4, is_ahead=False)[0] for run in runs]
    watched = Watched(make_runner(tmp_path))
    scheduler = Scheduler(watched.info, enable_prefix_cache=False)
    assert generate_ahead(watched, runs, 4, scheduler) == alone  # type: ignore[arg-type]
    assert watched._runner.prepare(), "something was left to compile, and that is no step"
    key = ("prompt", 64, 1, SampleKind.PLAIN)
    watched._runner._graphs._capture(key)
    again = Scheduler(watched.info, enable_prefix_cache=False)
    assert generate_ahead(watched, runs[2:], 4, again) == alone[2:]  # type: ignore[arg-type]
    assert {"NoneType", "DecodeGraph1", "DecodeGraph3", "PromptGraph64"} <= set(watched.ways)
    slots = watched._runner._slots
    assert slots.count.item() == slots.next_step == len(watched.plans)


def test_a_step_that_failed_in_its_launch_has_no_slot(monkeypatch, tmp_path) -> None:
    interpret_graphs(monkeypatch)
    runner = make_runner(tmp_path)
    expected = generate_ahead(runner, RUNS[:1], 3)
    with monkeypatch.context() as patch:
        patch.setattr(runner._packed, "_layers", None)
        with pytest.raises(TypeError):
            generate_ahead(runner, RUNS[:1], 3, Scheduler(runner.info, enable_prefix_cache=False))
    assert runner._slots.count.item() == runner._slots.next_step
    again = Scheduler(runner.info, enable_prefix_cache=False)
    assert generate_ahead(runner, RUNS[:1], 3, again) == expected


@pytest.mark.skipif(IS_NATIVE, reason="the device is a fake one")
def test_tokens_are_read_when_the_device_has_run_their_step(monkeypatch, tmp_path) -> None:
    """On a device that works only while the host asks how it is."""
    interpret_graphs(monkeypatch)
    runner = make_runner(tmp_path)
    expected = generate_ahead(runner, RUNS[:1], 3, is_ahead=False)
    waiting: list[CapturedStep] = []

    class Stream:
        def query(self) -> bool:
            if not waiting:
                return True
            step = waiting.pop()
            step.run(step._slots)
            return False

    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "replay", lambda self: waiting.append(self))
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(runner._slots, "_is_async", True)
        again = Scheduler(runner.info, enable_prefix_cache=False)
        assert generate_ahead(runner, RUNS[:1], 3, again, is_ahead=False) == expected
        patch.setattr(CapturedStep, "replay", lambda self: None)
        last = Scheduler(runner.info, enable_prefix_cache=False)
        with pytest.raises(IntegrityError, match="holds the results of step"):
            generate_ahead(runner, RUNS[:1], 3, last, is_ahead=False)


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
