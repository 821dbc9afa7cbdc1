"""Model shapes and random inputs of the kernel benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from kernels.decode_partials import DecodeWorkspace, new_decode_workspace
from kernels.decode_plan import DecodePlan, new_decode_plan, plan_decode
from kernels.new_tokens import NewTokens
from kernels.paged_decode import paged_decode
from kernels.rope import rope_tables
from kernels.tiles import DecodeTile, decode_tile

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
"""Without a GPU kernels run in Triton's interpreter, to try a benchmark out: float16, since its
bfloat16 products are wrong."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model, for benchmarks; head_norms: queries and keys are normed before they are
    turned."""

    name: str
    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    head_norms: bool = False

    @property
    def linear_layers(self) -> list[tuple[str, int, int]]:
        """(name, N, K) of the merged linear layers of one block."""
        q_size = self.num_q_heads * self.head_dim
        qkv = q_size + 2 * self.num_kv_heads * self.head_dim
        return [
            ("qkv", qkv, self.hidden),
            ("o", self.hidden, q_size),
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        ]


QWEN3_8B = ModelShape("qwen3-8b", 4096, 12288, 32, 8, 128, 36, 151936, head_norms=True)
QWEN3_06B = ModelShape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 28, 151936, head_norms=True)
SMOLLM2 = ModelShape("smollm2-135m", 576, 1536, 9, 3, 64, 30, 49152)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal bf16 values on the device; never zeros, which run faster than real data."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * scale


@dataclass(frozen=True, slots=True)
class DecodeSet:
    """Inputs of one decode attention call: qkv rows [B, (HQ + 2 HKV) * D] as they come from the
    projection, and what their new tokens are turned with, as the engine passes them. Without
    new_tokens queries count as turned, and new keys and values as kept."""

    qkv: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    new_tokens: NewTokens | None

    @property
    def q(self) -> torch.Tensor:
        """The queries [B, HQ, D], a view of the rows."""
        return self.qkv[:, : self.out[0].numel()].view(self.out.shape)

    def run(self, plan: DecodePlan, workspace: DecodeWorkspace) -> None:
        """Launch the kernel once, with the plan's tile. Rows stay as they are, so each launch does
        the same work again."""
        scale = self.out.shape[2] ** -0.5
        paged_decode(
            self.out,
            self.q,
            self.k_cache,
            self.v_cache,
            self.tables,
            self.rows,
            self.seq_lens,
            plan,
            workspace,
            scale,
            pdl=True,
            new_tokens=self.new_tokens,
        )


def decode_set(
    seq_lens: list[int], shape: ModelShape, block_size: int, turned_before: bool = False
) -> DecodeSet:
    """Random rows, and random caches behind random block tables. turned_before: without new
    tokens."""
    batch_size = len(seq_lens)
    max_blocks = -(-max(seq_lens) // block_size)
    num_blocks = sum(-(-n // block_size) for n in seq_lens)
    tables = torch.zeros(batch_size, max_blocks, dtype=torch.int32)
    order = torch.randperm(num_blocks, dtype=torch.int32)
    used = 0
    for row, seq_len in enumerate(seq_lens):
        count = -(-seq_len // block_size)
        tables[row, :count] = order[used : used + count]
        used += count
    head_dim = shape.head_dim
    kv_shape = (num_blocks, block_size, shape.num_kv_heads, head_dim)
    out_shape = (batch_size, shape.num_q_heads, head_dim)
    return DecodeSet(
        qkv=random(batch_size, (shape.num_q_heads + 2 * shape.num_kv_heads) * head_dim),
        out=torch.full(out_shape, math.nan, dtype=DTYPE, device=DEVICE),
        k_cache=random(*kv_shape),
        v_cache=random(*kv_shape),
        tables=tables.to(DEVICE),
        rows=torch.arange(batch_size, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        new_tokens=None if turned_before else _new_tokens(shape, max(seq_lens)),
    )


def _new_tokens(shape: ModelShape, max_len: int) -> NewTokens:
    """Norms of one layer, with the angles that all layers share."""
    q_norm, k_norm = (random(shape.head_dim) if shape.head_norms else None for _ in range(2))
    return NewTokens(*_angles(shape.head_dim, max_len), q_norm, k_norm)


@cache
def _angles(head_dim: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables(head_dim, max_len)
    return cos.to(DEVICE), sin.to(DEVICE)


def engine_tile(shape: ModelShape, num_rows: int) -> DecodeTile:
    """The tile of decode attention that the engine takes for a batch, in any order of sums."""
    return decode_tile(shape.head_dim, DTYPE, num_rows, hidden_size=shape.hidden)


def decode_plan_for(inputs: DecodeSet, tile: DecodeTile) -> tuple[DecodePlan, DecodeWorkspace]:
    """A filled plan and its workspace for one batch, in any order of sums."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count if HAS_GPU else 2
    num_q_heads, head_dim = inputs.out.shape[1:]
    num_kv_heads = inputs.k_cache.shape[2]
    programs = processors * tile.programs_per_sm
    plan = new_decode_plan(len(inputs.rows), tile, programs, 8192, DEVICE, in_order=False)
    plan_decode(plan, inputs.seq_lens, num_kv_heads)
    return plan, new_decode_workspace(plan, num_q_heads, num_kv_heads, head_dim)
