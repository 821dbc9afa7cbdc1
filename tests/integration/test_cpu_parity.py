"""The CPU engine on the real SmolLM2 weights: transformers' greedy tokens, and seeds that hold.

The reference tokens were made once (`data/make_smollm2_greedy.py`); one prompt is compared live.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.ring.records import Sampling
from engine.build import build_runner
from engine.config import EngineConfig
from engine.plan import Runner
from engine.scheduler import Scheduler
from tests.cpu_kit import SMOLLM2, generate, with_limits
from tests.integration.data.make_smollm2_greedy import greedy, load_reference

CASES = json.loads(
    Path(__file__).with_name("data").joinpath("smollm2_greedy.json").read_text(encoding="utf-8")
)
PROMPTS = [case["prompt"] for case in CASES]
EXPECTED = [case["tokens"] for case in CASES]
NEW_TOKENS = 64
SHORT = [i for i, prompt in enumerate(PROMPTS) if len(prompt) <= 64][:16]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="the SmolLM2 GGUF is not in the cache"),
]


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Exact float32 weights; tests narrow its limits as they need."""
    config = EngineConfig(
        model_path=str(SMOLLM2), device="cpu", quantization="none", kv_cache_bytes=700 << 20
    )
    return build_runner(config)


def test_each_prompt_alone_gives_the_reference_tokens(runner: Runner) -> None:
    chosen = [0, 17, len(PROMPTS) - 1]
    for i in chosen:
        assert generate(runner, [PROMPTS[i]], NEW_TOKENS) == [EXPECTED[i]]


def test_sixteen_at_once_give_the_reference_tokens(runner: Runner) -> None:
    assert generate(runner, PROMPTS, NEW_TOKENS) == EXPECTED


def test_chunks_of_sixteen_give_the_reference_tokens(runner: Runner) -> None:
    narrow = with_limits(runner, max_num_batched_tokens=16, chunk_align_tokens=1)
    assert generate(narrow, PROMPTS[1::3], NEW_TOKENS) == EXPECTED[1::3]


def test_a_prefix_hit_gives_the_reference_tokens(runner: Runner) -> None:
    scheduler = Scheduler(runner.info)
    prompt, expected = PROMPTS[-3], EXPECTED[-3]
    cached: list[int] = []
    first = generate(runner, [prompt], NEW_TOKENS, scheduler=scheduler, cached=cached)
    again = generate(runner, [prompt], NEW_TOKENS, scheduler=scheduler, cached=cached)
    assert cached[0] == 0
    assert cached[1] >= len(prompt) - runner.info.chunk_align_tokens
    assert first == again == [expected]


def test_preempted_rows_give_the_reference_tokens(runner: Runner) -> None:
    tight = with_limits(runner, num_blocks=40)
    scheduler = Scheduler(tight.info)
    prompts = [PROMPTS[i] for i in SHORT]
    outputs = generate(tight, prompts, NEW_TOKENS, scheduler=scheduler)
    assert scheduler.preemptions > 0
    assert outputs == [EXPECTED[i] for i in SHORT]


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(
    runner: Runner,
) -> None:
    prompts = [PROMPTS[i] for i in SHORT]
    settings = [Sampling(seed=1000 + i, temperature=0.8, top_p=0.95) for i in range(len(SHORT))]
    together = generate(runner, prompts, 48, settings)
    tight = with_limits(runner, num_blocks=36)
    scheduler = Scheduler(tight.info)
    assert generate(tight, prompts, 48, settings, scheduler) == together
    assert scheduler.preemptions > 0
    for i in (3, 9):
        assert generate(runner, [prompts[i]], 48, [settings[i]]) == [together[i]]


def test_one_prompt_agrees_with_a_live_reference(runner: Runner) -> None:
    model = load_reference(SMOLLM2)
    expected, _ = greedy(model, PROMPTS[8], new_tokens=16)
    assert generate(runner, [PROMPTS[8]], 16) == [expected]


def test_packed_weights_agree_with_float32_on_nearly_all_tokens() -> None:
    config = EngineConfig(model_path=str(SMOLLM2), device="cpu", kv_cache_bytes=400 << 20)
    packed = build_runner(config)
    assert packed.info.quantization == "packed"
    agreement = top1_agreement(packed)
    assert agreement >= 0.93, f"top-1 agreement with float32 is {agreement:.3f}"


def top1_agreement(runner: Runner) -> float:
    """Share of reference positions where one step gives the reference's next token."""
    prompts, expected = [], []
    for prompt, tokens in zip(PROMPTS[:16], EXPECTED[:16], strict=True):
        for at in range(0, NEW_TOKENS, 8):
            prompts.append(prompt + tokens[:at])
            expected.append(tokens[at])
    outputs = generate(runner, prompts, 1)
    same = sum(output == [token] for output, token in zip(outputs, expected, strict=True))
    return same / len(expected)
