"""The fake model: a pure function of the tokens before, and a strict reader of plans."""

from __future__ import annotations

import time

import numpy as np
import pytest

from broker.ring.records import Sampling
from engine.config import EngineConfig, FakeModel
from engine.errors import ConfigError, PlanError
from engine.fake_runner import build_fake_runner, expected_tokens
from engine.plan import StepPlan
from engine.scheduler import Scheduler
from tests.unit.engine_harness import VOCAB, Harness, make_runner, make_submit, sampled


def test_a_continuation_gives_the_tokens_of_the_whole() -> None:
    whole = expected_tokens([1, 2, 3], 20, VOCAB)
    assert expected_tokens([1, 2, 3, *whole[:7]], 13, VOCAB) == whole[7:]
    assert len(set(whole)) > 5


def test_tokens_depend_on_every_token_before_on_order_and_on_the_seed() -> None:
    base = expected_tokens([1, 2, 3], 8, VOCAB)
    assert expected_tokens([1, 3, 2], 8, VOCAB) != base
    assert expected_tokens([9, 2, 3], 8, VOCAB) != base
    assert expected_tokens([1, 2, 3], 8, VOCAB, sampled(1)) != base
    assert expected_tokens([1, 2, 3], 8, VOCAB, Sampling(seed=4)) == base, "greedy has no seed"


def first_plan(prompt: list[int], **sizes: int) -> StepPlan:
    scheduler = Scheduler(make_runner(**sizes).info)
    scheduler.submit(make_submit(1, prompt, 9))
    plan = scheduler.plan()
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": np.array([0, 64], np.int32)}, "with blocks"),
        ({"block_cols": np.array([0, 0], np.int32)}, "set twice"),
        ({"num_new": np.array([7], np.int32)}, "past its tokens"),
        ({"num_new": np.array([0], np.int32)}, "computes nothing"),
        ({"num_computed": np.array([1], np.int32)}, "past its tokens"),
        ({"sample": np.array([False])}, "sample differs"),
        ({"num_decode": 1}, "decode row"),
    ],
)
def test_a_wrong_plan_is_refused(change: dict[str, object], message: str) -> None:
    runner = make_runner()
    with pytest.raises(PlanError, match=message):
        runner.launch(first_plan([1, 2, 3, 4, 5, 6])._replace(**change))


def test_a_block_overwritten_under_a_row_is_noticed() -> None:
    harness = Harness(make_runner())
    harness.submit(1, [1] * 6, 9)
    harness.step()
    harness.runner._memory.kv_token[harness.scheduler.rows.table[0, 0] * 4] = 50
    with pytest.raises(PlanError, match="reads KV of other tokens"):
        harness.step()


def test_a_prefix_of_another_run_in_the_table_is_noticed() -> None:
    harness = Harness(make_runner())
    harness.submit(1, [1, 2, 3, 4, 8], 9)
    harness.step()
    harness.runner._memory.kv_sum[harness.scheduler.rows.table[0, 0] * 4 + 2] += np.uint64(1)
    with pytest.raises(PlanError, match="KV of another prefix"):
        harness.step()


def test_a_third_step_in_flight_and_an_empty_collect_are_refused() -> None:
    runner = make_runner(is_async=True)
    with pytest.raises(PlanError, match="no step in flight"):
        runner.collect()
    plan = first_plan([1, 2])
    runner.launch(plan)
    runner.launch(plan)
    with pytest.raises(PlanError, match="too many steps"):
        runner.launch(plan)


def test_a_plan_changed_after_its_launch_shows_in_an_asynchronous_runner() -> None:
    runner = make_runner(is_async=True)
    plan = first_plan([1, 2, 3])
    runner.launch(plan)
    plan.num_new[0] = 2
    with pytest.raises(PlanError, match="sample differs"):
        runner.collect()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_takes_the_time_that_was_set(is_async: bool) -> None:
    model = FakeModel(vocab_size=VOCAB, step_ms=20.0, is_async=is_async)
    runner = build_fake_runner(EngineConfig(fake=model))
    start = time.monotonic()
    runner.launch(first_plan([1]))
    runner.collect()
    assert time.monotonic() - start >= 0.02


def test_without_a_fake_model_there_is_no_fake_runner() -> None:
    with pytest.raises(ConfigError, match="set `fake`"):
        build_fake_runner(EngineConfig())
