"""Tiny random checkpoints of every family give transformers' logits on the CPU runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.build import build_runner
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.errors import ConfigError
from tests.cpu_kit import FAMILIES, generate, one_row_plan, save_tiny, with_limits

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(3).integers(3, 131, 45).tolist()


def runner_for(directory: Path, **settings: object) -> CpuRunner:
    config = EngineConfig(
        model_path=str(directory),
        device="cpu",
        block_size_tokens=8,
        kv_cache_bytes=1 << 20,
        num_threads=1,
        **settings,  # type: ignore[arg-type]
    )
    runner = build_runner(config)
    assert isinstance(runner, CpuRunner)
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_steps_give_the_reference_logits(family: str, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    runner = runner_for(tmp_path)
    computed = 0
    for step, length in enumerate([13, 16, 1, 9, 1, 1, 4]):
        plan = one_row_plan(PROMPT, computed, length, step, runner.info.block_size)
        logits = runner.logits(plan)
        computed += length
        torch.testing.assert_close(
            logits[0], expected[computed - 1], rtol=TOLERANCE, atol=TOLERANCE
        )
    assert computed == len(PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_generates_what_the_reference_generates(family: str, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path)
    prompts = [PROMPT[:length] for length in (1, 2, 9, 17, 40)]
    expected = []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    narrow = with_limits(runner_for(tmp_path), max_num_batched_tokens=16, chunk_align_tokens=1)
    assert generate(narrow, prompts, 12) == expected


def test_a_repetition_penalty_acts_as_in_transformers(tmp_path: Path) -> None:
    reference = save_tiny("qwen3", tmp_path)
    runner, prompt = runner_for(tmp_path), PROMPT[:12]
    outputs = []
    for penalty in (1.0, 1.4, 0.8):
        out = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None,
            repetition_penalty=penalty,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
        settings = [Sampling(repetition_penalty=penalty)]
        assert generate(runner, [prompt], 24, settings) == [outputs[-1]]
    assert outputs[0] != outputs[1] != outputs[2]


def test_a_step_too_narrow_for_a_tile_and_all_rows_is_refused(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path)
    with pytest.raises(ConfigError, match="at least 68: 64 and max_num_seqs"):
        runner_for(tmp_path, max_num_batched_tokens=67, max_num_seqs=4)


def test_a_sharded_checkpoint_equals_its_single_file(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    save_tiny("qwen3", single)
    save_tiny("qwen3", sharded, max_shard_size="60KB")
    assert (sharded / "model.safetensors.index.json").exists()
    plan = one_row_plan(PROMPT, 0, 30, 0, 8)
    logits = [runner_for(directory).logits(plan) for directory in (single, sharded)]
    assert torch.equal(*logits)
