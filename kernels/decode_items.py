"""Items of decode attention's work list: their fields, and their first keys and values ahead of
time."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.pdl import prefetch_l2


@triton.jit
def prefetch_tile(
    k_ptr,
    v_ptr,
    table_at,
    kv_offset,
    tile,
    seq_len,
    is_live,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Ask for the keys and values of one tile; of no tile in particular where it is not live."""
    positions = tile * TILE + tl.arange(0, TILE)
    here = is_live & (positions < seq_len)
    at = table_at + positions // BLOCK_SIZE
    block_ids = tl.load(at, mask=here, other=0, cache_modifier=".cg").to(tl.int64)
    offsets = block_ids * stride_block + (positions % BLOCK_SIZE) * stride_token + kv_offset
    LINE: tl.constexpr = 128 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lines = tl.arange(0, max(BLOCK_D // LINE, 1)) * LINE
    prefetch_l2(k_ptr + offsets[:, None] + lines[None, :])
    prefetch_l2(v_ptr + offsets[:, None] + lines[None, :])


@triton.jit
def load_item(items_ptr, work, is_live, NUM_KV: tl.constexpr):
    """Batch entry, first tile, end tile and slot of an item of the work list, past the L1 cache,
    which may hold the last step's list; zeros where it is not live."""
    at = items_ptr + (work // NUM_KV) * 4
    entry = tl.load(at, mask=is_live, other=0, cache_modifier=".cg")
    begin = tl.load(at + 1, mask=is_live, other=0, cache_modifier=".cg")
    end = tl.load(at + 2, mask=is_live, other=0, cache_modifier=".cg")
    slot = tl.load(at + 3, mask=is_live, other=0, cache_modifier=".cg")
    # Both ends of the item in one value: Triton 3.6 (tritongpu pipelining) takes a carried value
    # that is the lower bound of the inner loop for a constant, and then works on the wrong tiles.
    return entry, (begin.to(tl.int64) << 32) | end.to(tl.int64), slot


@triton.jit
def load_row(seq_len_ptr, row_ptr, entry, is_live):
    """Length and state row of a batch entry."""
    seq_len = tl.load(seq_len_ptr + entry, mask=is_live, other=0, cache_modifier=".cg")
    row = tl.load(row_ptr + entry, mask=is_live, other=0, cache_modifier=".cg")
    return seq_len, row.to(tl.int64)
