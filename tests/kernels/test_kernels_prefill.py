"""Prompt attention against float64: ragged prompts, cached prefixes, windows, padding."""

from __future__ import annotations

import pytest
import torch

from kernels.prefill import prefill_attention, prefill_attention_ref
from kernels.tiles import PrefillTile
from tests.kernels.test_kernels_paged_decode import ints, make_cache, poison_tails
from tests.kernels.util import DTYPES, TOLERANCE, poisoned, randn, relative_error

TILE = PrefillTile(block_m=32, block_n=16, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (4, 2, 64, 16, 0),
        (9, 3, 64, 16, 0),
        (2, 2, 96, 8, 0),
        (8, 1, 128, 32, 20),
        (2, 1, 256, 16, 7),
    ],
)
def test_prefill_matches_float64_on_ragged_prompts_with_prefixes(
    dtype, num_q_heads, num_kv_heads, head_dim, block_size, window
) -> None:
    new_tokens = [1, 37, 0, 16, 5]
    seq_lens = ints([90, 37, 0, 48, 5])
    bounds = [0]
    for count in new_tokens:
        bounds.append(bounds[-1] + count)
    cu_seqlens = ints(bounds)
    rows = ints([3, 0, 1, 2, 4])
    caches = make_cache(5, 96, block_size, num_kv_heads, head_dim, dtype)
    num_padding = 3
    q = randn(bounds[-1] + num_padding, num_q_heads, head_dim, dtype=dtype, seed=5)
    out = poisoned(*q.shape, dtype=dtype)
    scale = head_dim**-0.5
    args = (*caches, rows, seq_lens, cu_seqlens, scale, window)
    prefill_attention(out, q, *args, tile=TILE)
    expected = prefill_attention_ref(q, *args, dtype=torch.float64)
    assert relative_error(out[: bounds[-1]], expected[: bounds[-1]]) < TOLERANCE[dtype]
    assert out[bounds[-1] :].isnan().all(), "tokens beyond the last entry were written"


@pytest.mark.usefixtures("row_by_row_dots")
def test_a_token_has_the_same_bits_however_its_prompt_is_cut() -> None:
    dtype = DTYPES[-1]
    caches = make_cache(1, 96, 16, 2, 64, dtype)
    q = randn(80, 4, 64, dtype=dtype, seed=5)
    rows = ints([0])
    whole = poisoned(80, 4, 64, dtype=dtype)
    prefill_attention(whole, q, *caches, rows, ints([80]), ints([0, 80]), 0.125, tile=TILE)
    pieces = poisoned(80, 4, 64, dtype=dtype)
    for begin, end in [(0, 13), (13, 45), (45, 80)]:
        piece = pieces[begin:end]
        prefill_attention(
            piece,
            q[begin:end],
            *caches,
            rows,
            ints([end]),
            ints([0, end - begin]),
            0.125,
            tile=TILE,
        )
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("window", [0, 20])
def test_tiles_loaded_by_one_instruction_give_the_same_bits(block_n, window) -> None:
    """A block holds one tile, or two; in a row's last block is what nobody should read."""
    dtype = DTYPES[-1]
    caches = make_cache(2, 96, 32, 2, 64, dtype)
    poison_tails(*caches, [77, 45])
    q = randn(70, 4, 64, dtype=dtype, seed=5)
    args = (*caches, ints([0, 1]), ints([77, 45]), ints([0, 60, 70]), 0.125, window)
    plain, by_one = poisoned(*q.shape, dtype=dtype), poisoned(*q.shape, dtype=dtype)
    prefill_attention(plain, q, *args, tile=PrefillTile(32, block_n, 4, 3))
    prefill_attention(by_one, q, *args, tile=PrefillTile(32, block_n, 4, 3, tma=True))
    assert torch.equal(plain, by_one)
    assert plain.isfinite().all()
