"""The GPU decoder's packed and decode steps give transformers' logits.

Runs natively on a GPU, in Triton's interpreter elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from broker.ring.records import Sampling
from engine.gpu.build import new_shared_buffers
from engine.gpu.decode_graph import SharedBuffers
from engine.gpu.decoder import DecodeWork, GpuDecoder
from engine.gpu.kv_memory import new_kv_memory
from engine.gpu.linear import Linears
from engine.gpu.memory import StepLimits
from engine.gpu.packed_step import PackedSteps
from engine.gpu.row_tables import RowTables
from engine.loader import load_model
from engine.plan import NewRow, StepPlan
from kernels.decode_plan import plan_decode
from kernels.inputs import expand_inputs
from kernels.small_gemm import new_gemm_workspace
from tests.kernels import util

DEVICE = torch.device(util.DEVICE)
SMALL = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, head_dim=16, sliding_window=13),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
}
LIMITS = StepLimits(4, 64, 128, 16)
NONE = np.zeros(0, np.int32)


class Fixture:
    """A tiny model in transformers and in the GPU decoder, over one small cache."""

    def __init__(self, directory, config, deterministic: bool) -> None:
        torch.manual_seed(0)
        self.reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.reference.save_pretrained(directory)
        loaded = load_model(directory, torch.float32, DEVICE)
        self.spec = loaded.spec
        self.tables = RowTables(LIMITS, DEVICE)
        cache = new_kv_memory(self.spec, 32, LIMITS.block_size, torch.float32, DEVICE)
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
        self.decoder = GpuDecoder(
            self.spec, loaded.weights, cache, self.tables.block_table, self.tables.token_table,
            Linears(deterministic, new_gemm_workspace(DEVICE)),
        )  # fmt: skip
        self.buffers: SharedBuffers = new_shared_buffers(self.spec, LIMITS, torch.float32, DEVICE)
        self.packed = PackedSteps(self.decoder, self.tables, self.buffers, LIMITS)

    def expected(self, ids: np.ndarray) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor(ids)[None]).logits[0, -1]


def _plan(step_id, blocks, rows, computed, new, *, sample) -> StepPlan:
    block_rows, block_cols, block_ids = (
        np.array(column, np.int32)
        for column in (zip(*blocks, strict=True) if blocks else ([],) * 3)
    )
    return StepPlan(
        step_id, (), block_rows, block_cols, block_ids,
        np.array(rows, np.int32), np.array(computed, np.int32), np.array(new, np.int32),
        np.full(len(rows), sample), 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [*((family, False) for family in FAMILIES), ("qwen3", True)],
)
def test_prompt_chunks_then_decode_rows_give_the_reference_logits(
    tmp_path, family: str, deterministic: bool
) -> None:
    f = Fixture(tmp_path, FAMILIES[family], deterministic)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 131, n).astype(np.int32) for n in (37, 18))
    for row, ids in ((2, a), (0, b)):
        f.tables.take_over([NewRow(row, ids, len(ids), Sampling(), NONE, 0)])
    blocks = [(2, c, 5 + c) for c in range(3)] + [(0, c, 20 - c) for c in range(2)]
    # a's first 20 tokens, then the rest of a beside all of b
    f.packed.run(_plan(1, blocks, [2], [0], [20], sample=False), has_filters=False)
    f.packed.run(_plan(2, [], [2, 0], [20, 0], [17, 18], sample=True), has_filters=False)
    logits = f.buffers.head.logits[:2].cpu()
    torch.testing.assert_close(logits[0], f.expected(a), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], f.expected(b), rtol=0, atol=1e-4)
    tokens = f.buffers.out_tokens[:2].cpu().numpy()
    assert tokens.tolist() == [int(logits[0].argmax()), int(logits[1].argmax())]
    # the sampled tokens are in the token table: a step that never saw them goes on
    a, b = np.append(a, tokens[0]), np.append(b, tokens[1])
    _decode(f, rows=[0, 2, -1], computed=[18, 37, 0])
    logits = f.buffers.head.logits[:2].cpu()
    torch.testing.assert_close(logits[0], f.expected(b), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], f.expected(a), rtol=0, atol=1e-4)


def _decode(f: Fixture, rows: list[int], computed: list[int]) -> None:
    """What a captured decode step runs, for three entries of which the last is padding."""
    size = len(rows)
    device_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    a = f.buffers.activations.first(size)
    seq_lens = torch.zeros(size, dtype=torch.int32, device=DEVICE)
    expand_inputs(
        a.token_rows, a.positions, a.slots, seq_lens, device_rows,
        torch.tensor(computed, dtype=torch.int32, device=DEVICE),
        torch.arange(size + 1, dtype=torch.int32, device=DEVICE),
        f.tables.block_table, LIMITS.block_size,
    )  # fmt: skip
    plans = f.buffers.attention.plans
    for window, (plan, _) in plans.items():
        plan_decode(plan, seq_lens, f.spec.num_kv_heads, window=window)
    work = DecodeWork(device_rows, seq_lens, plans)
    f.decoder.decode(a, work, f.buffers.head.logits[:size])
