"""Helpers of the CPU runner's tests: tiny checkpoints, a runner driven by the real scheduler."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from broker.ring.records import Finish, Sampling, Submit
from engine.plan import NewRow, Runner, StepPlan
from engine.scheduler import Scheduler

SMOLLM2 = (
    Path(os.environ.get("TOKENBUS_CACHE", Path.home() / ".cache" / "tokenbus"))
    / "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
)

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama-multi-head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-linear-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama-head-dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "mistral-full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
}


def save_tiny(family: str, directory: Path, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Make a random checkpoint of a family, save it, and return the float32 reference model."""
    model_class, config_class, changes = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**_SIZES, **changes})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that attention, norms and biases all move the logits.
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def one_row_plan(
    token_ids: Sequence[int], num_computed: int, num_new: int, step_id: int, block_size: int
) -> StepPlan:
    """A plan for row 0 alone, its blocks counted backwards so that no id equals its column."""
    ids = np.array(token_ids, np.int32)
    first = -(-num_computed // block_size)
    columns = np.arange(first, -(-(num_computed + num_new) // block_size), dtype=np.int32)
    is_new = num_computed == 0
    new_row = NewRow(0, ids, len(ids), Sampling(), np.zeros(0, np.int32), 0)
    return StepPlan(
        step_id=step_id,
        new_rows=(new_row,) if is_new else (),
        block_rows=np.zeros(len(columns), np.int32),
        block_cols=columns,
        block_ids=np.int32(30) - columns,
        rows=np.zeros(1, np.int32),
        num_computed=np.array([num_computed], np.int32),
        num_new=np.array([num_new], np.int32),
        sample=np.ones(1, np.bool_),
        num_decode=int(not is_new and num_new == 1),
    )


def with_limits(runner: Runner, **changes: int) -> Runner:
    """The same runner, weights and cache, that states other limits to the scheduler."""
    narrow = copy.copy(runner)
    narrow.info = replace(runner.info, **changes)
    return narrow


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sequence[Sampling] | None = None,
    scheduler: Scheduler | None = None,
    cached: list[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Output tokens of all prompts, submitted at once and run to their length.

    prefixes: output that each run begins with, as after a crash. cached takes the number of prompt
    tokens that the prefix cache gave each run, in starting order.
    """
    scheduler = scheduler or Scheduler(runner.info)
    none = np.zeros(0, np.int32)
    outputs: dict[int, list[int]] = {}
    for rid, prompt in enumerate(prompts, start=1):
        prefix = list(prefixes[rid - 1]) if prefixes else []
        outputs[rid] = prefix
        settings = sampling[rid - 1] if sampling else Sampling()
        ids, prefix_ids = np.array(prompt, np.int32), np.array(prefix, np.int32)
        rejected = scheduler.submit(
            Submit(rid, ids, prefix_ids, none, new_tokens, sampling=settings)
        )
        if rejected is not None:
            raise ValueError(rejected.message)
    while (plan := scheduler.plan()) is not None:
        runner.launch(plan)
        scheduler.launched()
        outcome = scheduler.complete(runner.collect())
        for rid, token, finish in zip(
            outcome.rids.tolist(), outcome.token_ids.tolist(), outcome.finish, strict=True
        ):
            if finish == Finish.ERROR:
                raise ArithmeticError(f"run {rid} had logits that were not finite")
            outputs[rid].append(token)
        if cached is not None:
            cached.extend(outcome.cached_tokens.tolist())
    scheduler.check_integrity()
    return list(outputs.values())
