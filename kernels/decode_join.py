"""Partial results of decode attention without a second kernel: the program of a row's last item
joins them as they come.

As in split_k.py, the numbers themselves say whether they are there: a place in the workspace holds
EMPTY until its number comes, and again once it is taken. Items that are not a row's last come first
in the work list and wait for nobody, so those that wait get what they wait for, provided that all
programs run at the same time: the grid must fit on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.split_k import EMPTY
from kernels.tiles import DecodeTile

JOINED_HEAD_DIMS = (64, 128)
"""Head sizes for which an H200 holds as many programs at once as the tiles of 16-bit types ask for
(tests/kernels/test_native_compile.py)."""

REGISTERS_PER_SM, MAX_REGISTERS = 65_536, 255

_EMPTY = tl.constexpr(EMPTY)
_NAN = tl.constexpr(0x7FC00000)
_COPIES = tl.constexpr(32)
"""Of each item's maximum and sum, so that every thread looks at numbers of its own. Of a tensor
with fewer numbers than threads several hold the same one, and only one may have come after it."""
_MOST_NUMBERS = 8192
"""Numbers of partial results that a program holds at once: 64 registers a thread of four warps."""


def most_registers(tile: DecodeTile) -> int:
    """Registers of a thread with which a processor holds as many programs as the tile asks for."""
    threads = 32 * tile.num_warps * tile.programs_per_sm
    return min(REGISTERS_PER_SM // threads // 8 * 8, tile.max_registers or MAX_REGISTERS)


def items_at_once(group_heads: int, block_d: int) -> int:
    """Partial results that are joined at once: all their loads are in flight together."""
    return min(max(_MOST_NUMBERS // (triton.next_power_of_2(group_heads) * block_d), 2), 16)


@triton.jit
def _stored(x, AS_BITS: tl.constexpr):
    """x float32, or its bits, none of which are EMPTY."""
    if AS_BITS:
        stored = tl.where(x == x, x.to(tl.int32, bitcast=True), _NAN)
    else:
        stored = x
    return stored


@triton.jit
def write_item(
    out_at,
    acc_ptr,
    max_sum_ptr,
    slot,
    first_slot,
    count,
    first_head,
    m,
    l,
    acc,
    NUM_Q: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOINED_ITEMS: tl.constexpr,
):
    """An item's result, maximum m and sum l [BLOCK_H] and weighted values acc [BLOCK_D, BLOCK_H] of
    the heads from first_head on: into its slot, and joined with the others by the row's last item;
    or to out_at, of the entry's first head, where the row is one item (slot < 0).

    first_slot, count: of the row. JOINED_ITEMS: 0 where a second kernel joins them, which reads
    float32; otherwise the pointers are int32's.
    """
    lanes = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    heads = first_head + lanes
    head_mask = lanes < GROUP_HEADS
    mask = head_mask[None, :] & (dims < D)[:, None]
    if slot >= 0:
        at = slot.to(tl.int64) * NUM_Q + heads
        AS_BITS: tl.constexpr = JOINED_ITEMS > 0
        tl.store(max_sum_ptr + at * 2, _stored(m, AS_BITS), mask=head_mask)
        tl.store(max_sum_ptr + at * 2 + 1, _stored(l, AS_BITS), mask=head_mask)
        acc_at = acc_ptr + at[None, :] * D + dims[:, None]
        tl.store(acc_at, _stored(acc, AS_BITS), mask=mask)
        if JOINED_ITEMS > 0 and slot + 1 == first_slot + count:
            _join(
                out_at, acc_ptr, max_sum_ptr, first_slot, count, first_head,
                NUM_Q, GROUP_HEADS, D, BLOCK_D, JOINED_ITEMS,
            )  # fmt: skip
    else:
        out = (acc / tl.where(head_mask, l, 1.0)[None, :]).to(out_at.dtype.element_ty)
        tl.store(out_at + heads[None, :] * D + dims[:, None], out, mask=mask)


@triton.jit
def _join(
    out_at,
    acc_ptr,
    max_sum_ptr,
    first_slot,
    count,
    first_head,
    NUM_Q: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Join `count` partial results, ITEMS of them at a time, once they are there, this program's
    own among them; leave their places EMPTY, and write the outputs of the heads from first_head
    on."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP_HEADS)
    items = tl.arange(0, ITEMS)
    lanes = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK_G], -1e30, tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, count, ITEMS):
        here = (first + items < count)[:, None] & (lanes < GROUP_HEADS)[None, :]
        mask = here[:, :, None] & (dims < D)[None, None, :]
        at = (first_slot + first + items).to(tl.int64)[:, None] * NUM_Q + first_head
        at += lanes[None, :]
        part_at = acc_ptr + at[:, :, None] * D + dims[None, None, :]
        max_at = max_sum_ptr + at[:, :, None] * 2 + tl.zeros([1, 1, _COPIES], tl.int64)
        is_item = here[:, :, None] & (tl.arange(0, _COPIES) >= 0)[None, None, :]
        part = tl.load(part_at, mask=mask, other=0, volatile=True)
        maxima = tl.load(max_at, mask=is_item, other=0, volatile=True)
        sums = tl.load(max_at + 1, mask=is_item, other=0, volatile=True)
        while _is_any_empty(part, maxima, sums):
            part = tl.load(part_at, mask=mask, other=0, volatile=True)
            maxima = tl.load(max_at, mask=is_item, other=0, volatile=True)
            sums = tl.load(max_at + 1, mask=is_item, other=0, volatile=True)
        tl.store(part_at, tl.full(part.shape, _EMPTY, tl.int32), mask=mask)
        tl.store(max_at, tl.full(maxima.shape, _EMPTY, tl.int32), mask=is_item)
        tl.store(max_at + 1, tl.full(sums.shape, _EMPTY, tl.int32), mask=is_item)
        m_items = tl.max(tl.where(is_item, maxima.to(tl.float32, bitcast=True), -1e30), axis=2)
        l_items = tl.max(sums.to(tl.float32, bitcast=True), axis=2)
        m_new = tl.maximum(m, tl.max(m_items, axis=0))
        weights = tl.exp2(m_items - m_new[None, :])
        before = tl.exp2(m - m_new)
        l = l * before + tl.sum(l_items * weights, axis=0)
        values = part.to(tl.float32, bitcast=True)
        acc = acc * before[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        m = m_new
    head_mask = lanes < GROUP_HEADS
    out = (acc / tl.where(head_mask, l, 1.0)[:, None]).to(out_at.dtype.element_ty)
    mask = head_mask[:, None] & (dims < D)[None, :]
    tl.store(out_at + (first_head + lanes)[:, None] * D + dims[None, :], out, mask=mask)


@triton.jit
def _is_any_empty(a, b, c):
    """Whether a number is not there yet, of three tensors that differ in their last dimension."""
    empty = tl.max((a == _EMPTY).to(tl.int32), axis=2)
    empty = tl.maximum(empty, tl.max((b == _EMPTY).to(tl.int32), axis=2))
    empty = tl.maximum(empty, tl.max((c == _EMPTY).to(tl.int32), axis=2))
    return tl.max(tl.max(empty, axis=1), axis=0) == 1
