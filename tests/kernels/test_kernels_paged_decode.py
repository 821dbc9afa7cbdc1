"""Decode attention against float64, and its promise that a row's bits do not depend on the
batch."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_partials import new_decode_workspace
from kernels.decode_plan import new_decode_plan, plan_decode
from kernels.paged_decode import paged_decode, paged_decode_ref
from kernels.tiles import DecodeTile
from tests.kernels.util import DEVICE, DTYPES, TOLERANCE, poisoned, randn, relative_error

TILE = DecodeTile(tile_tokens=16, num_warps=4, num_stages=2, programs_per_sm=1)


def make_cache(num_rows, max_len, block_size, num_kv_heads, head_dim, dtype, seed=0):
    """Two caches with NaN in every slot that no row owns, and random block tables."""
    max_blocks = -(-max_len // block_size)
    num_blocks = num_rows * max_blocks + 3
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (
        randn(*shape, dtype=dtype, seed=seed),
        randn(*shape, dtype=dtype, seed=seed + 1),
    )
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    tables = order[: num_rows * max_blocks].reshape(num_rows, max_blocks).int()
    spare = order[num_rows * max_blocks :].to(DEVICE)
    k_cache[spare] = float("nan")
    v_cache[spare] = float("nan")
    return k_cache, v_cache, tables.to(DEVICE)


def decode(
    q, k_cache, v_cache, tables, rows, seq_lens, num_programs=8, window=0, tile=TILE, slots=512
):
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    plan = new_decode_plan(len(rows), tile.tile_tokens, num_programs, slots, q.device)
    workspace = new_decode_workspace(plan, num_q_heads, num_kv_heads, head_dim)
    workspace.acc.fill_(float("nan"))
    workspace.max_sum.fill_(float("nan"))
    out = poisoned(*q.shape, dtype=q.dtype)
    plan_decode(plan, seq_lens, num_kv_heads, window)
    scale = head_dim**-0.5
    paged_decode(
        out, q, k_cache, v_cache, tables, rows, seq_lens, plan, workspace, scale, window, tile=tile
    )
    return out


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (4, 2, 64, 16, 0),
        (9, 3, 64, 16, 0),
        (3, 3, 96, 8, 0),
        (8, 1, 128, 32, 20),
        (2, 1, 256, 16, 0),
    ],
)
def test_decode_matches_float64_on_ragged_lengths(
    dtype, num_q_heads, num_kv_heads, head_dim, block_size, window
) -> None:
    seq_lens = ints([1, 15, 0, 17, 131])
    rows = ints([3, 0, 1, 2, 4])
    caches = make_cache(5, 144, block_size, num_kv_heads, head_dim, dtype)
    q = randn(5, num_q_heads, head_dim, dtype=dtype, seed=5)
    out = decode(q, *caches, rows, seq_lens, window=window)
    expected = paged_decode_ref(
        q, *caches, rows, seq_lens, head_dim**-0.5, window, dtype=torch.float64
    )
    live = [0, 1, 3, 4]
    assert relative_error(out[live], expected[live]) < TOLERANCE[dtype]
    assert out[2].isnan().all(), "padding was written"


def test_a_row_has_the_same_bits_at_every_granularity() -> None:
    """One tile per item, one group per item and a whole row per item do the same arithmetic."""
    dtype = DTYPES[-1]
    caches = make_cache(3, 300, 16, 2, 64, dtype)
    q = randn(3, 4, 64, dtype=dtype, seed=5)
    rows, seq_lens = ints([0, 1, 2]), ints([291, 130, 16])
    by_tile = decode(q, *caches, rows, seq_lens, num_programs=64)
    by_group = decode(q, *caches, rows, seq_lens, num_programs=6)
    by_row = decode(q, *caches, rows, seq_lens, num_programs=1, slots=1)
    alone = decode(q[:1].clone(), *caches, rows[:1], seq_lens[:1], num_programs=512)
    assert torch.equal(by_tile, by_group)
    assert torch.equal(by_tile, by_row)
    assert torch.equal(by_tile[:1], alone)


def test_the_plan_covers_every_tile_once_and_long_items_come_first() -> None:
    seq_lens = ints([291, 0, 130, 16, 700])
    for num_programs, slots in [(256, 512), (6, 512), (1, 8)]:
        plan = new_decode_plan(5, 16, num_programs, slots, torch.device(DEVICE))
        plan_decode(plan, seq_lens, 2)
        items = plan.items[: int(plan.counts[0])].tolist()
        seen = sorted((entry, tile) for entry, a, b, _ in items for tile in range(a, b))
        expected = [
            (entry, tile)
            for entry, n in enumerate(seq_lens.tolist())
            for tile in range(-(-n // 16))
        ]
        assert seen == sorted(expected)
        slots_used = [slot for *_, slot in items if slot >= 0]
        assert len(set(slots_used)) == len(slots_used)
        assert all(slot < slots for slot in slots_used)


def test_the_same_plan_buffers_serve_longer_contexts_later() -> None:
    """What a graph replays: only device contents change between the calls."""
    dtype = DTYPES[-1]
    caches = make_cache(2, 200, 16, 1, 64, dtype)
    q = randn(2, 2, 64, dtype=dtype, seed=5)
    rows, seq_lens = ints([1, 0]), ints([3, 9])
    plan = new_decode_plan(2, 16, 8, 64, q.device)
    workspace = new_decode_workspace(plan, 2, 1, 64)
    for lengths in ([3, 9], [190, 61], [17, 0]):
        seq_lens.copy_(ints(lengths))
        out = poisoned(2, 2, 64, dtype=dtype)
        plan_decode(plan, seq_lens, 1)
        paged_decode(out, q, *caches, rows, seq_lens, plan, workspace, 0.125, tile=TILE)
        expected = paged_decode_ref(q, *caches, rows, seq_lens, 0.125, dtype=torch.float64)
        live = [i for i, n in enumerate(lengths) if n]
        assert relative_error(out[live], expected[live]) < TOLERANCE[dtype]
