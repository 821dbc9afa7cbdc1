"""The work list of decode attention, built on the device once per step from the sequence lengths.

The context of a row is cut into tiles of fixed length and tiles into groups, both counted from
position 0; how many tiles make a group follows from the row's own length. A row's result is always
the same nested fold: tiles into groups, groups into the row, in order. What varies with the load is
only how much of that fold one work item does: a tile (few rows: use every multiprocessor), a group,
or the whole row (many rows: no partial results). So with one tile for all batches the numbers do
not depend on the batch, and the choice is made here, on the device, where the lengths are.

Where the order of sums is free, an item is any number of tiles: the one with which the busiest
program has least to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options
from kernels.tiles import DecodeTile

NUM_COUNTS = 4
"""int32 fields of DecodePlan.counts: number of items, then three unused to keep the row 16 bytes
wide."""


WHOLE_ROW = tl.constexpr(1 << 20)
"""Tiles an item: more than any row has."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Device buffers of a work list; allocated once per batch bucket, refilled every step.

    items int32 [max_items, 4]: batch entry, first tile, end tile, slot of the partial result (-1:
    writes the output). counts int32 [4]: number of items, then unused. entries int32 [B, 4]: first
    slot, number of items, place of the first item in its group, items per group. tile: the cut of a
    row. num_programs: programs of the attention kernel. max_slots: partial results that the
    workspace holds; it also bounds max_items. in_order: items follow the nested fold.
    """

    items: torch.Tensor
    counts: torch.Tensor
    entries: torch.Tensor
    tile: DecodeTile
    num_programs: int
    max_slots: int
    in_order: bool


def new_decode_plan(
    batch_size: int,
    tile: DecodeTile,
    num_programs: int,
    max_slots: int,
    device: torch.device,
    in_order: bool = True,
) -> DecodePlan:
    """Allocate the buffers of a plan for at most batch_size entries; in_order: a row's sums are
    joined in order of position, the same in every batch."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    return DecodePlan(
        items=zeros(max_slots + batch_size, 4),
        counts=zeros(NUM_COUNTS),
        entries=zeros(batch_size, 4),
        tile=tile,
        num_programs=num_programs,
        max_slots=max_slots,
        in_order=in_order,
    )


@triton.jit
def group_tiles(tiles, UP_TO_16: tl.constexpr, UP_TO_64: tl.constexpr, BEYOND: tl.constexpr):
    """Tiles of one group for rows that attend to so many tiles; see `tiles.DecodeGroups`."""
    return tl.where(tiles <= 16, UP_TO_16, tl.where(tiles <= 64, UP_TO_64, BEYOND))


@triton.jit
def _items_of(begins, ends, tiles, per_item):
    """Work items of each row at per_item tiles an item."""
    return tl.where(tiles > 0, (ends + per_item - 1) // per_item - begins // per_item, 0)


@triton.jit
def _cost(items, share, longest, num_kv_heads, num_programs, max_slots):
    """Estimated time of a step in tiles: the even share or the longest item, a toll per round of
    items, and the last fold.

    The tolls (0.2 tiles an item, 0.03 a partial result) were fitted to H200 timings at 64-token
    tiles.
    """
    total = tl.sum(items, axis=0)
    rounds = (total * num_kv_heads + num_programs - 1) // num_programs
    length = tl.maximum(share, longest.to(tl.float32))
    cost = length + 0.2 * rounds + 0.5 + 0.03 * tl.max(items, axis=0)
    return tl.where(total <= max_slots, cost, 1e30)


@triton.jit
def _tiles_in_order(
    begins, ends, tiles, groups, num_kv_heads, num_programs, max_slots, BLOCK_B: tl.constexpr
):
    """Tiles an item, for each row: one, its group, or all."""
    live_rows = tl.sum((tiles > 0).to(tl.int32), axis=0)
    share = tl.sum(tiles, axis=0).to(tl.float32) * num_kv_heads / num_programs
    longest = tl.max(tiles, axis=0)
    by_tile = _cost(
        _items_of(begins, ends, tiles, 1), share, tl.minimum(longest, 1),
        num_kv_heads, num_programs, max_slots,
    )  # fmt: skip
    by_group = _cost(
        _items_of(begins, ends, tiles, groups), share, tl.max(tl.minimum(tiles, groups), axis=0),
        num_kv_heads, num_programs, max_slots,
    )  # fmt: skip
    row_rounds = (live_rows * num_kv_heads + num_programs - 1) // num_programs
    by_row = (row_rounds * longest).to(tl.float32)
    best = tl.minimum(tl.minimum(by_tile, by_group), by_row)
    per_items = tl.zeros([BLOCK_B], tl.int32) + WHOLE_ROW
    if best < by_row:
        per_items = groups
        if by_tile <= best:
            per_items = tl.full([BLOCK_B], 1, tl.int32)
    return per_items


@triton.jit
def _even_costs(begins, ends, tiles, per_item, num_kv_heads, num_programs, max_slots):
    """Tiles that the busiest program works on, with tolls for items and partial results, for each
    number of tiles an item in per_item [CHOICES]. Full items are dealt out first, each row's last
    one after them."""
    begins, ends, tiles = begins[:, None], ends[:, None], tiles[:, None]
    items = _items_of(begins, ends, tiles, per_item[None, :])
    full = tl.sum(tl.maximum(items - 1, 0), axis=0) * num_kv_heads
    lasts = tl.sum((items > 0).to(tl.int32), axis=0) * num_kv_heads
    last_begins = tl.maximum((items - 1) * per_item[None, :], begins)
    last = tl.max(tl.where(items > 0, ends - last_begins, 0), axis=0)
    last = tl.minimum(last, per_item)
    rounds = (full + num_programs - 1) // num_programs
    room = rounds * num_programs - full
    more = (tl.maximum(lasts - room, 0) + num_programs - 1) // num_programs
    cost = (rounds * per_item + more * last).to(tl.float32)
    cost += 0.2 * (rounds + more) + 0.5 + 0.03 * tl.max(items, axis=0)
    return tl.where(full + lasts <= max_slots * num_kv_heads, cost, 1e30)


@triton.jit
def _tiles_evenly(
    begins, ends, tiles, num_kv_heads, num_programs, max_slots, BLOCK_B: tl.constexpr
):
    """Tiles an item, the same for each row. All choices side by side: one after the other they take
    longer than a launch."""
    CHOICES: tl.constexpr = 32
    live_rows = tl.sum((tiles > 0).to(tl.int32), axis=0)
    row_rounds = (live_rows * num_kv_heads + num_programs - 1) // num_programs
    by_row = (row_rounds * tl.max(tiles, axis=0)).to(tl.float32)
    # 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ... 224
    choices = tl.arange(0, CHOICES)
    exponents = choices // 4
    steps = choices % 4
    per_item = tl.where(exponents == 0, steps + 1, (4 + steps) << tl.maximum(exponents - 1, 0))
    costs = _even_costs(begins, ends, tiles, per_item, num_kv_heads, num_programs, max_slots)
    least = tl.min(costs, axis=0)
    best = tl.min(tl.where(costs == least, per_item, WHOLE_ROW), axis=0)
    best = tl.where(least < by_row, best, WHOLE_ROW)
    return tl.zeros([BLOCK_B], tl.int32) + best


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["batch_size"])
def _plan_kernel(
    items_ptr,
    counts_ptr,
    entries_ptr,
    seq_len_ptr,
    batch_size,
    num_kv_heads,
    num_programs,
    max_slots,
    window,
    TILE: tl.constexpr,
    UP_TO_16: tl.constexpr,
    UP_TO_64: tl.constexpr,
    BEYOND: tl.constexpr,
    BLOCK_B: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per entry. Each reads all lengths, agrees on the granularity and writes its own
    items."""
    entry = tl.program_id(0)
    entries = tl.arange(0, BLOCK_B)
    pdl_begin(PDL)
    seq_lens = tl.load(seq_len_ptr + entries, mask=entries < batch_size, other=0)
    ends = (seq_lens + TILE - 1) // TILE
    begins = tl.where(window > 0, tl.maximum(seq_lens - window, 0) // TILE, 0)
    tiles = ends - begins
    groups = group_tiles(tiles, UP_TO_16, UP_TO_64, BEYOND)
    if IN_ORDER:
        per_items = _tiles_in_order(
            begins, ends, tiles, groups, num_kv_heads, num_programs, max_slots, BLOCK_B
        )
    else:
        per_items = _tiles_evenly(
            begins, ends, tiles, num_kv_heads, num_programs, max_slots, BLOCK_B
        )
    counts = _items_of(begins, ends, tiles, per_items)
    # Full-size items come first, each row's last one after all of them: short items fill the tail.
    heads = tl.maximum(counts - 1, 0)
    head_before = tl.sum(tl.where(entries < entry, heads, 0), axis=0)
    tail_before = tl.sum(tl.where((entries < entry) & (counts > 0), 1, 0), axis=0)
    slot_before = tl.sum(tl.where((entries < entry) & (counts > 1), counts, 0), axis=0)
    total_heads = tl.sum(heads, axis=0)
    is_own = entries == entry
    count = tl.sum(tl.where(is_own, counts, 0), axis=0)
    begin = tl.sum(tl.where(is_own, begins, 0), axis=0)
    end = tl.sum(tl.where(is_own, ends, 0), axis=0)
    per_item = tl.sum(tl.where(is_own, per_items, 0), axis=0)
    per_group = 1
    if IN_ORDER:
        per_group = tl.maximum(tl.sum(tl.where(is_own, groups, 0), axis=0) // per_item, 1)
    if entry == 0:
        tl.store(counts_ptr, total_heads + tl.sum(tl.where(counts > 0, 1, 0), axis=0))
    tl.store(entries_ptr + entry * 4, slot_before)
    tl.store(entries_ptr + entry * 4 + 1, count)
    tl.store(entries_ptr + entry * 4 + 2, (begin // per_item) % per_group)
    tl.store(entries_ptr + entry * 4 + 3, per_group)
    for first in range(0, count, 128):
        index = first + tl.arange(0, 128)
        mask = index < count
        at = tl.where(index == count - 1, total_heads + tail_before, head_before + index)
        item_begin = tl.maximum((begin // per_item + index) * per_item, begin)
        item_end = tl.minimum((begin // per_item + index + 1) * per_item, end)
        tl.store(items_ptr + at * 4, tl.zeros([128], tl.int32) + entry, mask=mask)
        tl.store(items_ptr + at * 4 + 1, item_begin, mask=mask)
        tl.store(items_ptr + at * 4 + 2, item_end, mask=mask)
        tl.store(items_ptr + at * 4 + 3, tl.where(count > 1, slot_before + index, -1), mask=mask)


def plan_decode(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Fill the work list for this step's lengths; once per step and window size, not per layer.

    Args:
        plan: buffers; items, counts and entries are written.
        seq_lens: int32 [B], tokens of each entry including the one being decoded; 0 for padding.
        num_kv_heads: kv heads of the attention calls that will use it.
        window: sliding window in tokens (the query's own included); 0: none.
        pdl: launch while the kernel before still runs.
    """
    batch_size = seq_lens.shape[0]
    block = max(triton.next_power_of_2(batch_size), 16)
    _plan_kernel[(batch_size,)](
        plan.items,
        plan.counts,
        plan.entries,
        seq_lens,
        batch_size,
        num_kv_heads,
        plan.num_programs,
        plan.max_slots,
        window,
        TILE=plan.tile.tile_tokens,
        UP_TO_16=plan.tile.groups.up_to_16,
        UP_TO_64=plan.tile.groups.up_to_64,
        BEYOND=plan.tile.groups.beyond,
        BLOCK_B=block,
        IN_ORDER=plan.in_order,
        num_warps=min(max(block // 16, 1), 8),
        **pdl_options(plan.items, pdl),
    )
