"""The softmax folds of decode attention: tiles within an item, and the join of two partial results.

Tiles fold into groups and groups into the result, always in order of position and with the
multiply-adds written out: the same code gives the same bits wherever an item begins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache_tiles import block_of


@triton.jit
def fold(m, l, acc, m_next, l_next, acc_next):
    """Join two partial softmax results in base 2; exact where one of them is empty (m = -inf, l =
    0, acc = 0)."""
    m_new = tl.maximum(m, m_next)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - reference)
    b = tl.exp2(m_next - reference)
    l_new = tl.fma(l, a, l_next * b)
    a_wide = tl.broadcast_to(a[:, None], acc.shape)
    acc_new = tl.fma(acc, a_wide, acc_next * b[:, None])
    return m_new, l_new, acc_new


@triton.jit
def _tile(
    q,
    k_ptr,
    v_ptr,
    table_at,
    kv_offset,
    tile,
    block_id,
    begin,
    seq_len,
    scale_log2,
    stride_block,
    stride_token,
    dims,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Softmax of q over the keys of one tile: maximum, sum and weighted values."""
    positions = tile * TILE + tl.arange(0, TILE)
    is_live = (positions < seq_len) & (positions >= begin)
    if TMA:
        slot = block_id * BLOCK_SIZE + tile * TILE % BLOCK_SIZE
        k = k_ptr.load([slot, kv_offset])
        # Nobody's values may be anything, and nothing times NaN is NaN.
        v = tl.where(is_live[:, None], v_ptr.load([slot, kv_offset]), 0.0)
    else:
        if BLOCK_SIZE % TILE == 0:
            offsets = block_id.to(tl.int64) * stride_block + kv_offset
            offsets += (positions % BLOCK_SIZE) * stride_token
        else:
            block_ids = tl.load(table_at + positions // BLOCK_SIZE, mask=is_live, other=0)
            offsets = block_ids.to(tl.int64) * stride_block + kv_offset
            offsets += (positions % BLOCK_SIZE) * stride_token
        kv_mask = is_live[:, None] & (dims < D)[None, :]
        k = tl.load(k_ptr + offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION) * scale_log2
    s = tl.where(is_live[None, :], s, float("-inf"))
    m = tl.max(s, axis=1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    l = tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, input_precision=DOT_PRECISION)
    return m, l, acc


@triton.jit
def fold_tiles(
    q,
    k_ptr,
    v_ptr,
    table_at,
    kv_offset,
    tile_begin,
    tile_end,
    begin,
    seq_len,
    scale_log2,
    stride_block,
    stride_token,
    dims,
    group,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """The part of the nested fold that covers tiles tile_begin .. tile_end - 1.

    group: tiles of a group, a power of two. TMA: k_ptr and v_ptr are descriptors.
    """
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_group, l_group, acc_group = m, l, acc
    # A tile in one block: its id is loaded while the tile before is worked on, so that loads of
    # keys depend on no load of their own turn and can be as far ahead as there are stages.
    block_id = block_of(table_at, tile_begin, tile_end, BLOCK_SIZE, TILE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        next_block_id = block_of(table_at, tile + 1, tile_end, BLOCK_SIZE, TILE)
        m_tile, l_tile, acc_tile = _tile(
            q,
            k_ptr,
            v_ptr,
            table_at,
            kv_offset,
            tile,
            block_id,
            begin,
            seq_len,
            scale_log2,
            stride_block,
            stride_token,
            dims,
            BLOCK_SIZE,
            TILE,
            D,
            BLOCK_D,
            DOT_PRECISION,
            TMA,
        )
        block_id = next_block_id
        m_group, l_group, acc_group = fold(m_group, l_group, acc_group, m_tile, l_tile, acc_tile)
        if (((tile + 1) & (group - 1)) == 0) | (tile + 1 == tile_end):
            m, l, acc = fold(m, l, acc, m_group, l_group, acc_group)
            m_group = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l_group = tl.zeros([BLOCK_M], tl.float32)
            acc_group = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return m, l, acc
