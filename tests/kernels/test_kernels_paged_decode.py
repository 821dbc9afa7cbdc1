"""Decode attention against float64, and its promise that a row's bits do not depend on the
batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import decode_partials
from kernels.decode_partials import new_decode_workspace
from kernels.decode_plan import new_decode_plan, plan_decode
from kernels.paged_decode import paged_decode, paged_decode_ref
from kernels.tiles import DecodeTile, decode_tile, decode_tiles
from tests.kernels.util import DEVICE, DTYPES, TOLERANCE, poisoned, randn, relative_error

TILE = DecodeTile(tile_tokens=16, num_warps=4, num_stages=2, programs_per_sm=1)


def make_cache(num_rows, max_len, block_size, num_kv_heads, head_dim, dtype, seed=0):
    """Two caches with random block tables; in every slot that no row owns keys are NaN, and values
    as large as they can be."""
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
    v_cache[spare] = torch.finfo(dtype).max
    return k_cache, v_cache, tables.to(DEVICE)


def decode(
    q, k_cache, v_cache, tables, rows, seq_lens,
    num_programs=8, window=0, tile=TILE, slots=512, in_order=True,
):  # fmt: skip
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    plan = new_decode_plan(len(rows), tile, num_programs, slots, q.device, in_order)
    workspace = new_decode_workspace(plan, num_q_heads, num_kv_heads, head_dim)
    workspace.acc.fill_(float("nan"))
    workspace.max_sum.fill_(float("nan"))
    out = poisoned(*q.shape, dtype=q.dtype)
    plan_decode(plan, seq_lens, num_kv_heads, window)
    scale = head_dim**-0.5
    paged_decode(out, q, k_cache, v_cache, tables, rows, seq_lens, plan, workspace, scale, window)
    return out


def poison_tails(k_cache, v_cache, tables, lengths):
    """What nobody wrote in each row's last block: keys NaN, values as large as they can be."""
    block_size = k_cache.shape[1]
    for row, length in enumerate(lengths):
        block = tables[row, length // block_size].long()
        k_cache[block, length % block_size :] = float("nan")
        v_cache[block, length % block_size :] = torch.finfo(v_cache.dtype).max


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


@pytest.mark.usefixtures("row_by_row_dots")
@pytest.mark.parametrize("window", [0, 150])
def test_a_row_has_the_same_bits_at_every_granularity(window) -> None:
    """One tile per item, one group per item and a whole row per item do the same arithmetic.

    The rows' groups have 8, 4 and 2 tiles: 66, 18 and 6 tiles of 16 tokens.
    """
    dtype = DTYPES[-1]
    caches = make_cache(3, 1056, 16, 1, 16, dtype)
    q = randn(3, 2, 16, dtype=dtype, seed=5)
    rows, seq_lens = ints([0, 1, 2]), ints([1045, 281, 90])
    args = (*caches, rows, seq_lens)
    by_tile = decode(q, *args, num_programs=1024, window=window)
    by_group = decode(q, *args, num_programs=4 if window else 12, window=window)
    by_row = decode(q, *args, num_programs=1, slots=1, window=window)
    alone = decode(q[:1].clone(), *caches, rows[:1], seq_lens[:1], num_programs=512, window=window)
    at_once = decode(q, *args, num_programs=1024, window=window, in_order=False)
    expected = paged_decode_ref(q, *args, 0.25, window, dtype=torch.float64)
    assert relative_error(by_tile, expected) < TOLERANCE[dtype]
    assert torch.equal(by_tile, by_group)
    assert torch.equal(by_tile, by_row)
    assert torch.equal(by_tile[:1], alone)
    assert relative_error(at_once, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("many_rows", [48, 4])
def test_partial_results_are_joined_head_by_head_or_several_at_once(
    monkeypatch, in_order, many_rows
) -> None:
    """Ten heads in programs of eight; more items than one program joins at once; a padded row."""
    dtype = DTYPES[-1]
    lengths = [270, 16, 0, 100]
    caches = make_cache(4, 272, 16, 2, 16, dtype)
    q = randn(4, 10, 16, dtype=dtype, seed=5)
    rows, seq_lens = ints([0, 1, 2, 3]), ints(lengths)
    monkeypatch.setattr(decode_partials, "MANY_ROWS", many_rows)
    out = decode(q, *caches, rows, seq_lens, num_programs=64, in_order=in_order)
    whole = decode(q, *caches, rows, seq_lens, num_programs=1, slots=1)
    expected = paged_decode_ref(q, *caches, rows, seq_lens, 0.25, dtype=torch.float64)
    live = [i for i, n in enumerate(lengths) if n]
    assert relative_error(out[live], expected[live]) < TOLERANCE[dtype]
    assert torch.equal(out[live], whole[live]) or not in_order
    assert out[2].isnan().all(), "padding was written"


@pytest.mark.skipif(torch.bfloat16 not in DTYPES and torch.float16 not in DTYPES, reason="2 bytes")
@pytest.mark.parametrize("tile_tokens", [16, 32])
def test_tiles_loaded_by_one_instruction_give_the_same_bits(tile_tokens) -> None:
    """A block holds one tile, or two; in a row's last block is what nobody should read."""
    dtype = next(d for d in DTYPES if d.itemsize == 2)
    caches = make_cache(3, 160, 32, 2, 64, dtype)
    lengths = [150, 0, 33]
    poison_tails(*caches, lengths)
    q = randn(3, 6, 64, dtype=dtype, seed=5)
    args = (*caches, ints([0, 1, 2]), ints(lengths))
    tile = DecodeTile(tile_tokens, 4, 3, 1)
    for num_programs, window in ((64, 0), (2, 0), (64, 40)):
        plain = decode(q, *args, num_programs, window, tile)
        by_one = decode(q, *args, num_programs, window, replace(tile, tma=True))
        assert torch.equal(plain[[0, 2]], by_one[[0, 2]])
        assert plain[[0, 2]].isfinite().all()


def plan_of(
    lengths, num_programs, slots=4096, window=0, tile=TILE, num_kv_heads=2, in_order=True
):  # fmt: skip
    """Item lengths in tiles, as the plan made them."""
    device = torch.device(DEVICE)
    plan = new_decode_plan(len(lengths), tile, num_programs, slots, device, in_order)
    plan_decode(plan, ints(lengths), num_kv_heads, window)
    items = plan.items[: int(plan.counts[0])].tolist()
    return plan, sorted({b - a for _, a, b, _ in items})


def test_a_work_item_is_a_tile_a_group_or_a_row_as_the_batch_grows() -> None:
    """Eight rows of 1,152 tokens over 8 kv heads, at 132 processors: groups of two tiles."""
    tile = DecodeTile(128, 4, 2, 2)
    assert plan_of([1152], 264, tile=tile, num_kv_heads=8)[1] == [1]
    assert plan_of([1152] * 8, 264, tile=tile, num_kv_heads=8)[1] == [1, 2]
    assert plan_of([1152] * 64, 264, tile=tile, num_kv_heads=8)[1] == [9]


def test_in_any_order_items_are_as_long_as_leaves_the_busiest_program_least() -> None:
    """Rows of 18 tiles over 8 kv heads, 264 programs."""
    tile = DecodeTile(64, 4, 2, 2)
    lengths = {
        count: plan_of([1152] * count, 264, tile=tile, num_kv_heads=8, in_order=False)[1]
        for count in (1, 4, 8, 64, 256)
    }
    assert lengths == {1: [1], 4: [3], 8: [3, 5], 64: [18], 256: [18]}
    # One long row beside short ones is cut, and partial results stay within the workspace.
    plan, items = plan_of([60_000, 64, 64], 264, 24, tile=tile, num_kv_heads=8, in_order=False)
    assert max(items) < 938 // 8
    assert int(plan.counts[0]) <= 24


def test_the_tables_have_a_tile_for_any_number_of_rows_and_one_where_bits_must_not_differ() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            mosts = [most for most, _ in decode_tiles(head_dim, dtype)]
            assert mosts == sorted(set(mosts))
            assert mosts[-1] > 1 << 20
            for rows in (1, 2, 3, 16, 17, 256):
                found = decode_tile(head_dim, dtype, rows)
                assert (
                    found == dict(decode_tiles(head_dim, dtype))[min(m for m in mosts if m >= rows)]
                )
            assert len(decode_tiles(head_dim, dtype, same_bits=True)) == 1
    assert decode_tile(64, torch.bfloat16, 1) != decode_tile(64, torch.bfloat16, 17)


def test_the_plan_covers_every_tile_once_and_long_items_come_first() -> None:
    seq_lens = ints([291, 0, 130, 16, 700])
    for num_programs, slots in [(256, 512), (6, 512), (1, 8)]:
        plan = new_decode_plan(5, TILE, num_programs, slots, torch.device(DEVICE))
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
    plan = new_decode_plan(2, TILE, 8, 64, q.device)
    workspace = new_decode_workspace(plan, 2, 1, 64)
    for lengths in ([3, 9], [190, 61], [17, 0]):
        seq_lens.copy_(ints(lengths))
        out = poisoned(2, 2, 64, dtype=dtype)
        plan_decode(plan, seq_lens, 1)
        paged_decode(out, q, *caches, rows, seq_lens, plan, workspace, 0.125)
        expected = paged_decode_ref(q, *caches, rows, seq_lens, 0.125, dtype=torch.float64)
        live = [i for i, n in enumerate(lengths) if n]
        assert relative_error(out[live], expected[live]) < TOLERANCE[dtype]
