"""The GPU runner on a tiny random model, driven as the engine's loop drives it: one step ahead.

On a GPU it is the runner as it is. Elsewhere its kernels are interpreted: a graph is not captured,
and replaying it launches its kernels, so all that is missing is that the steps overlap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.ring.records import Finish, Sampling, Submit
from engine.gpu.buffers import new_shared_buffers
from engine.gpu.captured import CapturedStep
from engine.gpu.decoder import GpuDecoder
from engine.gpu.graph_cache import GraphCache
from engine.gpu.kv_memory import new_kv_memory
from engine.gpu.linear import Linears
from engine.gpu.memory import StepLimits
from engine.gpu.row_tables import RowTables
from engine.gpu.runner import GpuRunner
from engine.loader import load_dummy
from engine.plan import RunnerInfo
from engine.scheduler import Scheduler
from kernels.split_k import new_gemm_workspace
from tests.kernels.util import DEVICE, IS_NATIVE

LIMITS = StepLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=128, block_size=16)
NUM_BLOCKS = 24
VOCAB = 140
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its prompt, its settings, output of an earlier attempt."""

    prompt: Sequence[int]
    sampling: Sampling
    prefix: Sequence[int] = ()


def interpret_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: graphs that are launched kernel by kernel."""
    if IS_NATIVE:
        return
    monkeypatch.setattr(CapturedStep, "capture", lambda self, spare, site: self.run(spare))
    monkeypatch.setattr(CapturedStep, "replay", lambda self: self.run(self._slots))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def make_runner(
    directory: Path,
    num_blocks: int = NUM_BLOCKS,
    deterministic: bool = True,
    limits: StepLimits = LIMITS,
) -> GpuRunner:
    """A float32 runner of a Llama that the interpreter is done with soon."""
    device = torch.device(DEVICE)
    torch.manual_seed(3)
    (directory / "config.json").write_text(json.dumps(_MODEL))
    loaded = load_dummy(directory, torch.float32, device)
    spec = loaded.spec
    tables = RowTables(limits, spec.vocab_size, device)
    cache = new_kv_memory(spec, num_blocks, limits.block_size, torch.float32, device)
    cache.k.fill_(float("nan"))  # not what was there, which may make the interpreter warn
    decoder = GpuDecoder(
        spec, loaded.weights, cache, tables.block_table, tables.token_table,
        Linears(deterministic, new_gemm_workspace(device)),
    )  # fmt: skip
    buffers = new_shared_buffers(spec, limits, torch.float32, device, same_bits=deterministic)
    info = RunnerInfo(
        model="tiny",
        architecture=spec.architecture,
        device=DEVICE,
        dtype="float32",
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=(),
        block_size=limits.block_size,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        load_s=0.0,
        weight_bytes=0,
        kv_bytes=0,
        replays_by_decode=True,
    )
    return GpuRunner(
        info, decoder, tables, buffers, GraphCache(decoder, tables, buffers, limits), limits
    )


def generate_ahead(
    runner: GpuRunner,
    runs: Sequence[Run],
    new_tokens: int,
    scheduler: Scheduler | None = None,
    is_ahead: bool = True,
) -> list[list[int]]:
    """Output of all runs, submitted at once, each step launched before the one before it is
    collected; is_ahead=False: after."""
    scheduler = scheduler or Scheduler(runner.info)
    outputs = {rid: list(run.prefix) for rid, run in enumerate(runs, start=1)}
    for rid, run in enumerate(runs, start=1):
        submit = Submit(
            rid,
            np.array(run.prompt, np.int32),
            np.array(run.prefix, np.int32),
            NONE,
            new_tokens,
            sampling=run.sampling,
        )
        assert scheduler.submit(submit) is None
    while True:
        plan = scheduler.plan()
        if plan is not None:
            runner.launch(plan)
            scheduler.launched()
        if scheduler.num_in_flight > (is_ahead and plan is not None):
            outcome = scheduler.complete(runner.collect())
            assert Finish.ERROR not in outcome.finish
            for rid, token in zip(outcome.rids.tolist(), outcome.token_ids.tolist(), strict=True):
                outputs[rid].append(token)
        elif plan is None:
            break
    scheduler.check_integrity()
    return list(outputs.values())
