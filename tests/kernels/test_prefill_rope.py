"""Prompt attention that turns its own queries, beside the launch that turns them before it."""

from __future__ import annotations

import pytest
import torch

from kernels.new_tokens import NewTokens
from kernels.prefill import prefill_attention, prefill_attention_ref
from kernels.rope import rope_kv_write, rope_ref, rope_tables
from kernels.tiles import PrefillTile
from tests.kernels.test_kernels_paged_decode import ints, make_cache, poison_tails
from tests.kernels.util import DEVICE, DTYPES, TOLERANCE, poisoned, randn, relative_error

TILE = PrefillTile(block_m=32, block_n=16, num_warps=4, num_stages=2)
NEW_TOKENS, SEQ_LENS = [1, 37, 0, 16, 5], [90, 37, 0, 48, 5]
NUM_PADDING = 3


def packed(num_heads, num_kv_heads, head_dim, dtype):
    """qkv rows as they leave the projection, bounds of their prompts, each token's position (0 for
    padding, which is NaN)."""
    bounds = [0]
    for count in NEW_TOKENS:
        bounds.append(bounds[-1] + count)
    positions = [
        position
        for count, length in zip(NEW_TOKENS, SEQ_LENS, strict=True)
        for position in range(length - count, length)
    ]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = poisoned(bounds[-1] + NUM_PADDING, width, dtype=dtype)
    qkv[: bounds[-1]] = randn(bounds[-1], width, dtype=dtype, seed=5) * 3
    return qkv, ints(bounds), ints(positions + [0] * NUM_PADDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "tile"),
    [
        (4, 2, 64, 16, 0, TILE),
        (9, 3, 64, 16, 0, TILE),
        (2, 2, 96, 8, 0, TILE),
        (6, 2, 96, 16, 11, TILE),
        (8, 1, 128, 32, 20, TILE),
        (4, 2, 128, 32, 0, PrefillTile(32, 16, 4, 3, tma=True)),
        (2, 1, 256, 16, 7, TILE),
    ],
)
def test_queries_are_turned_where_they_are_loaded(
    dtype, with_norm, num_heads, num_kv_heads, head_dim, block_size, window, tile
) -> None:
    qkv, bounds, positions = packed(num_heads, num_kv_heads, head_dim, dtype)
    num_tokens, raw = int(bounds[-1]), qkv.clone()
    caches = make_cache(5, 96, block_size, num_kv_heads, head_dim, dtype)
    rows, seq_lens = ints([3, 0, 1, 2, 4]), ints(SEQ_LENS)
    by_row = dict(zip(rows.tolist(), SEQ_LENS, strict=True))
    poison_tails(*caches, [by_row[row] for row in range(5)])
    cos, sin = (t.to(DEVICE) for t in rope_tables(head_dim, 90))
    norms = [randn(head_dim, dtype=dtype, seed=s) for s in (3, 4)] if with_norm else [None, None]
    q = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    args = (*caches, rows, seq_lens, bounds, head_dim**-0.5, window)
    out = poisoned(*q.shape, dtype=dtype)
    prefill_attention(out, q, *args, tile=tile, new_tokens=NewTokens(cos, sin, *norms))
    assert torch.equal(qkv.view(torch.int8), raw.view(torch.int8)), "queries were written"
    assert out[num_tokens:].isnan().all(), "tokens beyond the last entry were written"

    turned = rope_ref(q, cos, sin, positions, norms[0])
    expected = prefill_attention_ref(turned, *args, dtype=torch.float64)
    assert relative_error(out[:num_tokens], expected[:num_tokens]) < TOLERANCE[dtype]

    slots = torch.full_like(positions, -1)
    slots[:num_tokens] = positions[:num_tokens]  # of a cache that nobody reads
    spare = [poisoned(90, 1, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    rope_kv_write(qkv, *spare, cos, sin, positions, slots, num_heads, *norms)
    before = poisoned(*q.shape, dtype=dtype)
    prefill_attention(before, q, *args, tile=tile)
    assert relative_error(out[:num_tokens], before[:num_tokens]) < TOLERANCE[dtype] / 4
