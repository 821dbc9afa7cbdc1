"""The softmax of decode attention over the tiles of a work item; the join of partial results.

Keys stand in the rows of the dot and query heads in its columns: a tile's keys and values go from
shared memory into the tensor cores as they lie there, and eight columns hold a group of eight heads
without padding.

In order, tiles fold into groups and groups into the result, by position and with the multiply-adds
written out: the same code gives the same bits wherever an item begins. Otherwise one running
result is carried from tile to tile, with half the arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.cache_tiles import block_of, load_tile
from kernels.decode_new_token import load_turned, nothing_loaded


@triton.jit
def fold(m, l, acc, m_next, l_next, acc_next, AXIS: tl.constexpr):
    """Join two partial softmax results in base 2; exact where one of them is empty (m = -inf, l =
    0, acc = 0). AXIS: of acc, that m and l lack."""
    m_new = tl.maximum(m, m_next)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - reference)
    b = tl.exp2(m_next - reference)
    l_new = tl.fma(l, a, l_next * b)
    a_wide = tl.broadcast_to(tl.expand_dims(a, AXIS), acc.shape)
    acc_new = tl.fma(acc, a_wide, acc_next * tl.expand_dims(b, AXIS))
    return m_new, l_new, acc_new


@triton.jit
def _scores(
    q,
    k,
    tile,
    begin,
    seq_len,
    scale_log2,
    TILE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """Scores of one tile's keys in base 2, [TILE, heads]; -inf for keys that do not count."""
    positions = tile * TILE + tl.arange(0, TILE)
    is_live = (positions < seq_len) & (positions >= begin)
    s = tl.dot(k, tl.trans(q), input_precision=DOT_PRECISION) * scale_log2
    return tl.where(is_live[:, None], s, float("-inf"))


@triton.jit
def fold_tiles(
    heads_at,
    q_mask,
    is_new,
    turns,
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
    m,
    l,
    acc,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    IN_ORDER: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LATE_QUERY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add tiles tile_begin .. tile_end - 1 to maximum m [heads], sum l [heads] and weighted values
    acc [D, heads].

    In order m, l and acc are those of nothing (-inf, 0, 0); otherwise m is finite. group: tiles of
    a group of the nested fold, a power of two. TMA: k_ptr and v_ptr are descriptors. Values of
    slots that nobody wrote are multiplied by zero: the cache holds none that is not finite (see
    `kernels.rope`). The query and what comes with it: see `load_turned`. LATE_QUERY: with PDL the
    wait is in here, and there must be a tile.

    Returns m, l, acc, and what `load_turned` returns.
    """
    m_group, l_group, acc_group = m, l, acc
    # One sum for each key of a tile, added up at the end: no exchange between warps in the loop.
    l_keys = tl.where(tl.arange(0, TILE)[:, None] == 0, l[None, :], 0.0)
    # A tile in one block: its id is loaded while the tile before is worked on, so that loads of
    # keys depend on no load of their own turn and can be as far ahead as there are stages.
    block_id = block_of(table_at, tile_begin, tile_end, BLOCK_SIZE, TILE)
    if LATE_QUERY:
        dtype: tl.constexpr = heads_at[0].dtype.element_ty
        q, raw_k, k_partner, raw_v = nothing_loaded(dtype, BLOCK_H, BLOCK_D)
    else:
        q, raw_k, k_partner, raw_v = load_turned(
            heads_at, q_mask, is_new, turns, dims, D, BLOCK_D, NEW_TOKENS, HAS_NORM
        )
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        next_block_id = block_of(table_at, tile + 1, tile_end, BLOCK_SIZE, TILE)
        k, v = load_tile(
            k_ptr, v_ptr, table_at, block_id, tile, seq_len - 1, kv_offset,
            stride_block, stride_token, dims, BLOCK_SIZE, TILE, D, TMA,
        )  # fmt: skip
        block_id = next_block_id
        # In here, and not before the loop: the first keys and values are on their way by then.
        if LATE_QUERY and tile == tile_begin:
            if PDL:
                gdc_wait()
            q, raw_k, k_partner, raw_v = load_turned(
                heads_at, q_mask, is_new, turns, dims, D, BLOCK_D, NEW_TOKENS, HAS_NORM
            )
        s = _scores(q, k, tile, begin, seq_len, scale_log2, TILE, DOT_PRECISION)
        m_tile = tl.max(s, axis=0)
        if IN_ORDER:
            p = tl.exp2(s - tl.where(m_tile == float("-inf"), 0.0, m_tile)[None, :])
            l_tile = tl.sum(p, axis=0)
            acc_tile = tl.dot(tl.trans(v), p.to(v.dtype), input_precision=DOT_PRECISION)
            m_group, l_group, acc_group = fold(
                m_group, l_group, acc_group, m_tile, l_tile, acc_tile, 0
            )
            if (((tile + 1) & (group - 1)) == 0) | (tile + 1 == tile_end):
                m, l, acc = fold(m, l, acc, m_group, l_group, acc_group, 0)
                m_group = tl.full([BLOCK_H], float("-inf"), tl.float32)
                l_group = tl.zeros([BLOCK_H], tl.float32)
                acc_group = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
        else:
            m_new = tl.maximum(m, m_tile)
            alpha = tl.exp2(m - m_new)[None, :]
            p = tl.exp2(s - m_new[None, :])
            l_keys = l_keys * alpha + p
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * alpha, input_precision=DOT_PRECISION)
            m = m_new
    if not IN_ORDER:
        l = tl.sum(l_keys, axis=0)
    return m, l, acc, q, raw_k, k_partner, raw_v
