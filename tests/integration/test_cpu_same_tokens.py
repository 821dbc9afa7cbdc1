"""Packed SmolLM2 on the CPU: a run's tokens are its own, whatever happens around it or to it.

Packed products round activations to bfloat16, so one different last bit in attention soon gives
other text. The tokens can only be equal where all bits are.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from broker.ring.records import Sampling
from engine.build import build_runner
from engine.config import EngineConfig
from engine.cpu.int8 import has_int8_products
from engine.plan import Runner
from engine.scheduler import Scheduler
from tests.cpu_kit import SMOLLM2, generate, with_limits

CASES = json.loads(
    Path(__file__).with_name("data").joinpath("smollm2_greedy.json").read_text(encoding="utf-8")
)
LENGTHS = {1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 47, 63, 64, 65, 129, 200}
PROMPTS = [case["prompt"] for case in CASES if len(case["prompt"]) in LENGTHS]
SAMPLING = [
    Sampling(
        seed=100 + i,
        temperature=0.8 * (i % 2),
        top_p=0.95,
        repetition_penalty=1.2 if i % 4 > 1 else 1.0,
        frequency_penalty=0.3 if i % 4 > 2 else 0.0,
    )
    for i in range(len(PROMPTS))
]
NEW_TOKENS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="the SmolLM2 GGUF is not in the cache"),
]


@pytest.fixture(scope="module")
def runner() -> Runner:
    """The default runner of this model."""
    config = EngineConfig(
        model_path=str(SMOLLM2), device="cpu", kv_cache_bytes=400 << 20, num_threads=1
    )
    runner = build_runner(config)
    assert runner.info.quantization == ("int8" if has_int8_products() else "packed")
    assert runner.info.replays_by_decode
    return runner


@pytest.fixture(scope="module")
def undisturbed(runner: Runner) -> list[list[int]]:
    """What each of 16 runs gives beside the others; half greedy, half at temperature 0.8, half with
    penalties.
    """
    assert len(PROMPTS) == runner.info.max_num_seqs == 16
    return generate(runner, PROMPTS, NEW_TOKENS, SAMPLING)


def test_a_run_alone_gives_the_tokens_it_gives_beside_others(
    runner: Runner, undisturbed: list[list[int]]
) -> None:
    for i in (0, 3, 11, 12, 15):
        assert generate(runner, [PROMPTS[i]], NEW_TOKENS, [SAMPLING[i]]) == [undisturbed[i]]


def test_runs_continued_at_random_points_beside_each_other_give_the_rest(
    runner: Runner, undisturbed: list[list[int]]
) -> None:
    points = random.Random(1)
    prefixes = [tokens[: points.randrange(NEW_TOKENS)] for tokens in undisturbed]
    again = generate(runner, PROMPTS, NEW_TOKENS, SAMPLING, prefixes=prefixes)
    assert again == undisturbed


def test_runs_continued_alone_give_the_rest(runner: Runner, undisturbed: list[list[int]]) -> None:
    for i, point in ((0, 1), (5, 17), (12, NEW_TOKENS - 1), (15, 8)):
        prefix = undisturbed[i][:point]
        again = generate(runner, [PROMPTS[i]], NEW_TOKENS, [SAMPLING[i]], prefixes=[prefix])
        assert again == [undisturbed[i]]


def test_preempted_runs_give_the_same_tokens(runner: Runner, undisturbed: list[list[int]]) -> None:
    longest = max(map(len, PROMPTS)) + NEW_TOKENS
    tight = with_limits(runner, num_blocks=2 * -(-longest // runner.info.block_size))
    scheduler = Scheduler(tight.info)
    assert generate(tight, PROMPTS, NEW_TOKENS, SAMPLING, scheduler) == undisturbed
    assert scheduler.preemptions > 0


def test_cached_prompts_and_outputs_give_the_same_tokens(
    runner: Runner, undisturbed: list[list[int]]
) -> None:
    """A prompt that goes on where another run's output begins must not take that run's KV."""
    scheduler = Scheduler(runner.info)
    prompt, tokens, sampling = PROMPTS[-1], undisturbed[-1], SAMPLING[-1:]
    grown = prompt + tokens[:-1]
    expected = generate(runner, [grown], 8, sampling)
    cached: list[int] = []
    for _ in range(2):
        assert generate(runner, [prompt], NEW_TOKENS, sampling, scheduler, cached) == [tokens]
    assert generate(runner, [grown], 8, sampling, scheduler, cached) == expected
    align = runner.info.chunk_align_tokens
    assert cached == [0, *[len(prompt) // align * align] * 2]
    assert cached[1] > 0
