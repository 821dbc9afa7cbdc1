"""Which graph takes a step, and when one is captured; no GPU: captures are only noted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.gpu import graph_cache
from engine.gpu.graph_cache import GraphCache, decode_sizes, num_graphs, prompt_sizes
from engine.gpu.memory import StepLimits
from engine.gpu.step_costs import StepCosts
from engine.plan import StepPlan
from kernels.sampling_tables import new_sampling_tables

LIMITS = StepLimits(64, 4096, 4096, 64)
SMALL = StepCosts(weight_bytes=900_000_000, flops_per_token=900_000_000, num_launches=250)
LARGE = StepCosts(weight_bytes=15_000_000_000, flops_per_token=15_000_000_000, num_launches=324)
NONE = np.zeros(0, np.int32)


class Tables:
    """What a captured step reads when it is made."""

    def __init__(self) -> None:
        self.block_table = torch.zeros(64, 64, dtype=torch.int32)
        self.token_table = torch.zeros(64, 64, dtype=torch.int32)
        self.sampling = new_sampling_tables(64, torch.device("cpu"))


@pytest.fixture
def captured(monkeypatch) -> list[tuple]:
    """Keys in the order in which they were captured."""
    keys: list[tuple] = []
    original = GraphCache._capture

    def capture(self, key):
        keys.append(key)
        return original(self, key)

    monkeypatch.setattr(GraphCache, "_capture", capture)
    monkeypatch.setattr(graph_cache.DecodeGraph, "capture", lambda self, spare, pool: None)
    monkeypatch.setattr(graph_cache.PromptGraph, "capture", lambda self, spare, pool: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return keys


def make_cache(costs: StepCosts = SMALL, deterministic: bool = False) -> GraphCache:
    decoder = SimpleNamespace(costs=costs, linears=SimpleNamespace(deterministic=deterministic))
    return GraphCache(decoder, Tables(), None, LIMITS)  # type: ignore[arg-type]


def plan_of(num_decode: int, *chunks: int, computed: list[int] | None = None) -> StepPlan:
    num_new = np.array([1] * num_decode + list(chunks), np.int32)
    rows = np.arange(len(num_new), dtype=np.int32)
    num_computed = np.zeros_like(rows)
    num_computed[:num_decode] = computed or 0
    return StepPlan(
        1, (), NONE, NONE, NONE, rows, num_computed, num_new,
        np.ones(len(rows), np.bool_), num_decode,
    )  # fmt: skip


def test_a_decode_step_is_captured_when_it_comes(captured) -> None:
    cache = make_cache()
    assert cache.find(plan_of(3), False) is cache.find(plan_of(4), False)
    assert captured == [("decode", 4, 0, False)]


def test_a_prompt_does_not_wait_for_a_capture(captured) -> None:
    cache = make_cache()
    assert cache.find(plan_of(0, 1000), False) is None
    assert captured == []
    assert cache.capture_one()
    assert captured == [("prompt", 1024, 1, False)], "what was missed comes first"
    assert cache.find(plan_of(0, 1000), False) is not None


def test_a_prompt_size_that_comes_again_and_again_is_captured_in_its_path(captured) -> None:
    cache = make_cache()
    tries = 0
    while cache.find(plan_of(0, 100, 20), False) is None:
        tries += 1
    assert 1 < tries < 100
    assert captured == [("prompt", 128, 8, False)]


def test_idle_moments_capture_everything_common_once_and_small_decode_sizes_first(captured) -> None:
    cache = make_cache()
    while cache.capture_one():
        pass
    assert len(set(captured)) == len(captured)
    assert captured[:4] == [("decode", size, 0, False) for size in (1, 2, 4, 8)]
    assert captured[4][0] == "prompt"
    several = [key for key in captured if key[0] == "prompt" and key[2] > 1]
    assert captured[-len(several) :] == several, "bursts of prompts come last"
    assert captured[-len(several) - 1] == ("decode", 64, 0, False)
    assert [key for key in several if key[2] == 8][-1] == ("prompt", 4096, 8, False)
    assert several[-1] == ("prompt", 4096, 64, False)
    assert not any(key[3] for key in captured), "nobody asked for filters"


def test_after_one_request_with_filters_idle_moments_capture_those_too(captured) -> None:
    cache = make_cache()
    cache.find(plan_of(1), True)
    while cache.capture_one():
        pass
    assert ("decode", 64, 0, True) in captured
    assert ("prompt", 1024, 1, True) in captured


def test_a_mixed_step_of_few_rows_is_captured_like_one_of_prompts(captured) -> None:
    """Each decode row as a chunk of one token: padding for eight rows."""
    cache = make_cache()
    assert cache.find(plan_of(3, 40, 20), False) is None
    assert captured == []
    assert cache.capture_one()
    assert captured == [("prompt", 64, 8, False)]
    assert cache.find(plan_of(3, 40, 20), False) is cache.find(plan_of(0, 30, 30), False)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, plan_of(64, 30)),
        ({"costs": LARGE}, plan_of(8, 300)),
        ({"costs": LARGE}, plan_of(0, 4000)),
        ({}, plan_of(2, 30, computed=[5, 3000])),
        ({"deterministic": True}, plan_of(1, 30)),
    ],
    ids=["many rows", "many rows of a large model", "long prompt", "long context", "deterministic"],
)
def test_other_mixed_steps_and_long_prompts_have_no_graph(captured, options, plan) -> None:
    cache = make_cache(**options)
    assert cache.find(plan, False) is None
    assert captured == []
    assert cache.capture_one()
    assert captured == [("decode", 1, 0, False)]


def test_a_prompt_is_padded_only_where_that_is_quicker_than_launching(captured) -> None:
    """A small model's step takes the host longer than the device, a large model's padding takes
    the device longer than what the host saves."""
    small, large = make_cache(SMALL), make_cache(LARGE)
    for cache in (small, large):
        while cache.capture_one():
            pass
    assert small.find(plan_of(0, 520), False) is not None
    assert large.find(plan_of(0, 520), False) is None
    assert large.find(plan_of(0, 760), False) is not None, "close to the captured size"
    assert large.find(plan_of(0, 70), False) is not None, "bound by the bytes of the weights"
    assert large.find(plan_of(0, 768), False) is not None


def test_models_bound_by_launches_have_sizes_of_more_rows_and_tokens() -> None:
    limits = StepLimits(256, 8448, 4096, 64)
    sizes = prompt_sizes(SMALL, limits)
    assert list(sizes) == [1, 8, 64, 256]
    for rows in (8, 64, 256):
        assert sizes[rows][-4:] == (3072, 4096, 6144, 8448)
    assert (sizes[64][0], sizes[256][0]) == (64, 256), "a row has a token at least"
    large = prompt_sizes(LARGE, limits)
    assert large[8] == sizes[8][:-4]
    assert large[8][-1] == 2048
    assert large[64] == (64, 128, 256, 512, 768), "longer ones take the device far longer"
    assert large[256] == (256, 512, 768)


def test_the_memory_plan_counts_graphs_of_prompts_too() -> None:
    limits = StepLimits(256, 8448, 4096, 64)
    prompts = sum(map(len, prompt_sizes(SMALL, limits).values()))
    assert prompts > 30
    assert num_graphs(SMALL, limits) == 3 * len(decode_sizes(256)) + prompts
    assert num_graphs(LARGE, limits) < num_graphs(SMALL, limits)


def test_small_limits_leave_sizes_within_them_or_none() -> None:
    assert list(prompt_sizes(SMALL, StepLimits(20, 3000, 4096, 64))) == [1, 8, 20]
    assert prompt_sizes(SMALL, StepLimits(4, 100, 4096, 64)) == {1: (16, 32, 64), 4: (16, 32, 64)}
    assert prompt_sizes(SMALL, StepLimits(1, 8, 4096, 64)) == {}
