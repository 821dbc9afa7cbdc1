"""Prompt attention: packed new tokens of many sequences over paged context, cached prefix included.

One program takes BLOCK_Q tokens of one sequence with the whole GQA group of one kv head packed
into M, so each key tile is read once per group. All keys, the new ones too, come from the cache.
Queries may come as they leave the projection: each is loaded by one program, which turns it.
Tiles start at position 0 of the sequence whatever the chunk, so a token's result does not depend
on how its prompt was cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache_tiles import (
    block_of,
    cache_tiles,
    gather_kv,
    load_tile,
    takes_tiles,
    tile_bytes,
)
from kernels.new_tokens import NewTokens, load_queries, new_token_arguments
from kernels.paged_decode import LOG2_E
from kernels.shared_memory import fitting_stages
from kernels.tiles import PrefillTile, prefill_tile


@triton.jit
def _find_entry(cu_seqlens_ptr, block, batch_size, BLOCK_Q: tl.constexpr):
    """Entry whose query blocks contain `block`: entry e begins at block cu[e] // BLOCK_Q + e, spare
    blocks included."""
    low = 0
    high = batch_size
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle
        if begin <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(
    do_not_specialize=["batch_size"],
    do_not_specialize_on_alignment=["row_ptr", "seq_len_ptr", "cu_seqlens_ptr"],
)
def _prefill_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    row_ptr,
    seq_len_ptr,
    cu_seqlens_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    eps,
    scale_log2,
    window,
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    stride_block,
    stride_token,
    NUM_KV: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    # Blocks late in a sequence have the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    entry = _find_entry(cu_seqlens_ptr, block, batch_size, BLOCK_Q)
    token_begin = tl.load(cu_seqlens_ptr + entry)
    token_end = tl.load(cu_seqlens_ptr + entry + 1)
    first = (block - (token_begin // BLOCK_Q + entry)) * BLOCK_Q
    num_new = token_end - token_begin
    seq_len = tl.load(seq_len_ptr + entry)
    if (first >= num_new) | (seq_len == 0):
        return
    row = tl.load(row_ptr + entry).to(tl.int64)
    num_computed = seq_len - num_new
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_index = first + lanes // GROUP_HEADS
    lane_mask = (lanes < BLOCK_Q * GROUP_HEADS) & (q_index < num_new)
    q_heads = kv_head * GROUP_HEADS + lanes % GROUP_HEADS
    q_rows = (token_begin + q_index).to(tl.int64)
    lane_offsets = q_heads[:, None] * D + dims[None, :]
    q_mask = lane_mask[:, None]
    q_at = q_ptr + q_rows[:, None] * q_stride + q_heads[:, None] * D
    last_position = num_computed + tl.minimum(first + BLOCK_Q, num_new) - 1
    # Lanes without a token see what the last one sees: keys beyond may be anything.
    q_positions = tl.minimum(num_computed + q_index, last_position)
    key_begin = 0
    if HAS_WINDOW:
        key_begin = tl.maximum(num_computed + first - window + 1, 0)
    table_at = block_table_ptr + row * table_stride
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Tiles below `full_end` need no mask unless there is a window.
    first_tile = key_begin // BLOCK_N
    end_tile = last_position // BLOCK_N + 1
    full_end = first_tile
    if not HAS_WINDOW:
        full_end = tl.maximum((num_computed + first + 1) // BLOCK_N, first_tile)
    # Ids are loaded a turn ahead: loads of keys depend on no load of their own turn and can be as
    # far ahead as there are stages.
    block_id = block_of(table_at, first_tile, end_tile, BLOCK_SIZE, BLOCK_N)
    if TMA:
        q = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
    else:
        q = load_queries(
            q_at, q_mask, q_positions, dims, cos_ptr, sin_ptr, q_norm_ptr, eps,
            D, BLOCK_D, TURNS, HAS_NORM,
        )  # fmt: skip
    # One loop, though few tiles have a mask: a second one would begin with no keys on their way.
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        next_block_id = block_of(table_at, tile + 1, end_tile, BLOCK_SIZE, BLOCK_N)
        k, v = load_tile(
            k_ptr, v_ptr, table_at, block_id, tile, last_position, kv_head * D,
            stride_block, stride_token, dims, BLOCK_SIZE, BLOCK_N, D, TMA,
        )  # fmt: skip
        block_id = next_block_id
        # In here, and not before the loop: the first keys and values are on their way by then. Not
        # where registers are short, in which they then stay.
        if TMA and tile == first_tile:
            q = load_queries(
                q_at, q_mask, q_positions, dims, cos_ptr, sin_ptr, q_norm_ptr, eps,
                D, BLOCK_D, TURNS, HAS_NORM,
            )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION)
        if tile >= full_end:
            keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            is_seen = keys[None, :] <= q_positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > q_positions[:, None] - window)
            s = tl.where(is_seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        reference = m_new
        if HAS_WINDOW:
            # A row may see no key of the first tiles: keep -inf out of the differences.
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - reference)
        p = tl.exp2(s * scale_log2 - reference[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=DOT_PRECISION)
        m = m_new
    out = acc / tl.where(lane_mask, l, 1.0)[:, None]
    out_at = out_ptr + q_rows[:, None] * out_stride + lane_offsets
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=q_mask & (dims < D)[None, :])


def prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int = 0,
    tile: PrefillTile | None = None,
    new_tokens: NewTokens | None = None,
) -> None:
    """Causal attention of packed new tokens; entry b owns tokens cu_seqlens_q[b] ..
    cu_seqlens_q[b + 1] - 1.

    Entry b's last new token has position seq_lens[b] - 1; positions before its first new token
    are the cached prefix. Keys and values of the new tokens must be in the cache. Entries with
    seq_len 0 are padding and write nothing; so do tokens from cu_seqlens_q[R] on. No length is
    read on the host: the grid is bounded by T and R.

    Args:
        out: [T, HQ, D], last two dimensions contiguous; written.
        q: [T, HQ, D], last two dimensions contiguous (may be a view of packed qkv rows).
        k_cache, v_cache: [num_blocks, block_size, HKV, D], contiguous, dtype of q.
        block_tables: int32 [max rows, max blocks].
        rows: int32 [R], row of each entry in block_tables.
        seq_lens: int32 [R], total tokens of each entry after the step.
        cu_seqlens_q: int32 [R + 1].
        scale: usually D ** -0.5.
        window: sliding window in tokens, the query's own included; 0: none.
        tile: None: from the table.
        new_tokens: queries come as they leave the projection: norm and turn them, as
            `rope_kv_write` would, when they are loaded. q is not written.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group_heads = num_q_heads // num_kv_heads
    if tile is None:
        tile = prefill_tile(head_dim, group_heads, q.dtype)
    block_m = max(tile.block_m, triton.next_power_of_2(group_heads))
    block_q = block_m // group_heads
    num_entries = rows.shape[0]
    tma = tile.tma and takes_tiles(k_cache, tile.block_n)
    cos, sin, q_norm, _, eps = new_token_arguments(q, new_tokens)
    grid = (num_tokens // block_q + num_entries, num_kv_heads)
    _prefill_kernel[grid](
        out,
        q,
        cache_tiles(k_cache, tile.block_n) if tma else k_cache,
        cache_tiles(v_cache, tile.block_n) if tma else v_cache,
        block_tables,
        rows,
        seq_lens,
        cu_seqlens_q,
        cos,
        sin,
        q_norm,
        eps,
        scale * LOG2_E,
        window,
        num_entries,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        NUM_KV=num_kv_heads,
        GROUP_HEADS=group_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_SIZE=block_size,
        BLOCK_N=tile.block_n,
        STAGES=fitting_stages(tile.num_stages, tile_bytes(k_cache, tile.block_n)),
        DOT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        TMA=tma,
        HAS_WINDOW=window > 0,
        TURNS=new_tokens is not None,
        HAS_NORM=new_tokens is not None and new_tokens.q_norm is not None,
        num_warps=tile.num_warps,
    )


def prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests); NaN for padding."""
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=q.device)
    group_heads = q.shape[1] // k_cache.shape[2]
    bounds = cu_seqlens_q.tolist()
    for entry, seq_len in enumerate(seq_lens.tolist()):
        begin, end = bounds[entry], bounds[entry + 1]
        if seq_len == 0 or begin == end:
            continue
        k, v = (
            gather_kv(cache, block_tables[int(rows[entry])], seq_len)
            .to(dtype)
            .repeat_interleave(group_heads, dim=1)
            for cache in (k_cache, v_cache)
        )
        keys = torch.arange(seq_len, device=q.device)
        queries = keys[seq_len - (end - begin) :]
        is_seen = keys[None, :] <= queries[:, None]
        if window > 0:
            is_seen &= keys[None, :] > queries[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(dtype), k) * scale
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
