"""The CPU engine on the real SmolLM2 weights: transformers' greedy tokens, and seeds that hold.

The reference tokens were made once (`data/make_smollm2_greedy.py`); one prompt is compared live.
All 32 prompts run to their full length once; the other tests take fewer prompts or tokens, since a
step of float32 weights is slow (`python -m bench.cpu_parity` runs all of them in every way).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from broker.ring.records import Sampling
from engine.build import build_runner
from engine.config import EngineConfig
from engine.cpu.int8 import has_int8_products
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
FEW_TOKENS = 20
SHORT = PROMPTS[:16]  # 1 to 40 tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="the SmolLM2 GGUF is not in the cache"),
]


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Exact float32 weights; tests narrow its limits as they need."""
    config = EngineConfig(
        model_path=str(SMOLLM2),
        device="cpu",
        quantization="none",
        kv_cache_bytes=400 << 20,
        num_threads=1,
    )
    return build_runner(config)


def expected(num_tokens: int, prompts: slice = slice(None)) -> list[list[int]]:
    """The first reference tokens of some prompts."""
    return [tokens[:num_tokens] for tokens in EXPECTED[prompts]]


def test_sixteen_at_once_give_the_reference_tokens(runner: Runner) -> None:
    assert runner.info.max_num_seqs == 16
    assert generate(runner, PROMPTS, NEW_TOKENS) == EXPECTED


def test_chunks_of_sixteen_give_the_reference_tokens(runner: Runner) -> None:
    narrow = with_limits(runner, max_num_batched_tokens=16, chunk_align_tokens=1)
    assert generate(narrow, PROMPTS, FEW_TOKENS) == expected(FEW_TOKENS)


@pytest.mark.parametrize("at", [0, 9, 16, 19, 28], ids=lambda at: f"{len(PROMPTS[at])}-tokens")
def test_a_prompt_alone_gives_the_reference_tokens(runner: Runner, at: int) -> None:
    num_tokens = NEW_TOKENS if at == 0 else FEW_TOKENS
    assert generate(runner, [PROMPTS[at]], num_tokens) == [EXPECTED[at][:num_tokens]]


def test_the_longest_prompt_alone_and_from_the_cache_gives_the_reference_tokens(
    runner: Runner,
) -> None:
    scheduler = Scheduler(runner.info)
    prompt, tokens = PROMPTS[-1], EXPECTED[-1]
    cached: list[int] = []
    first = generate(runner, [prompt], NEW_TOKENS, scheduler=scheduler, cached=cached)
    again = generate(runner, [prompt], FEW_TOKENS, scheduler=scheduler, cached=cached)
    assert cached[0] == 0
    assert cached[1] >= len(prompt) - runner.info.chunk_align_tokens
    assert first == [tokens]
    assert again == [tokens[:FEW_TOKENS]]


def test_seeds_and_preempted_rows_give_the_same_tokens(runner: Runner) -> None:
    """Greedy rows beside rows at temperature 0.8: all at once, with too little KV, and alone."""
    settings = [
        Sampling(seed=1000 + i, temperature=0.8 * (i % 2), top_p=0.95) for i in range(len(SHORT))
    ]
    together = generate(runner, SHORT, FEW_TOKENS, settings)
    assert together[::2] == expected(FEW_TOKENS, slice(0, 16, 2))
    assert together[1::2] != expected(FEW_TOKENS, slice(1, 16, 2))
    tight = with_limits(runner, num_blocks=30)
    scheduler = Scheduler(tight.info)
    assert generate(tight, SHORT, FEW_TOKENS, settings, scheduler) == together
    assert scheduler.preemptions > 0
    for i in (3, 9):
        assert generate(runner, [SHORT[i]], FEW_TOKENS, [settings[i]]) == [together[i]]


def test_one_prompt_agrees_with_a_live_reference(runner: Runner) -> None:
    model = load_reference(SMOLLM2)
    tokens, _ = greedy(model, PROMPTS[8], new_tokens=16)
    assert generate(runner, [PROMPTS[8]], 16) == [tokens]


@pytest.mark.parametrize(
    ("quantization", "scheme", "least"), [("auto", "int8", 0.92), ("packed", "packed", 0.95)]
)
def test_fast_products_agree_with_float32_on_nearly_all_tokens(
    quantization: Literal["auto", "packed"], scheme: str, least: float
) -> None:
    if scheme == "int8" and not has_int8_products():
        pytest.skip("this CPU has no fast 8-bit products")
    config = EngineConfig(
        model_path=str(SMOLLM2),
        device="cpu",
        kv_cache_bytes=400 << 20,
        num_threads=1,
        quantization=quantization,
    )
    runner = build_runner(config)
    assert runner.info.quantization == scheme
    agreement = top1_agreement(runner)
    assert agreement >= least, f"top-1 agreement with float32 is {agreement:.3f}"


def top1_agreement(runner: Runner) -> float:
    """Share of reference positions where one step gives the reference's next token."""
    prompts, following = [], []
    for prompt, tokens in zip(SHORT, EXPECTED, strict=False):
        for at in range(0, NEW_TOKENS, 16):
            prompts.append(prompt + tokens[:at])
            following.append(tokens[at])
    outputs = generate(runner, prompts, 1)
    same = sum(output == [token] for output, token in zip(outputs, following, strict=True))
    return same / len(following)
