"""Decode attention over a paged KV cache: one query token per sequence, GQA heads packed into the
columns of the dot.

A persistent grid walks the work list of kernels/decode_plan.py. A row with one item writes its
output directly; of a row with several, each item leaves an fp32 partial result, which a small
second kernel joins (it returns at once for the others): all at once, or in order of position by the
very fold that the first kernel uses, with its multiply-adds written out. Then a row's result is bit
for bit the same in every batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_tiles import cache_tiles, gather_kv, takes_tiles, tile_bytes
from kernels.decode_fold import fold_tiles
from kernels.decode_items import load_item, load_row, prefetch_tile
from kernels.decode_new_token import add_new_token, keep_new_token, load_angles, load_norm, turn
from kernels.decode_partials import DecodeWorkspace, join_partials
from kernels.decode_plan import DecodePlan, group_tiles
from kernels.new_tokens import NewTokens, new_token_arguments
from kernels.pdl import pdl_options
from kernels.rope import finite
from kernels.shared_memory import fitting_stages

LOG2_E = math.log2(math.e)


@triton.jit
def _paged_decode_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    block_table_ptr,
    row_ptr,
    seq_len_ptr,
    items_ptr,
    counts_ptr,
    acc_ptr,
    max_sum_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    scale_log2,
    window,
    q_stride,
    out_stride,
    table_stride,
    stride_block,
    stride_token,
    NUM_KV: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    UP_TO_16: tl.constexpr,
    UP_TO_64: tl.constexpr,
    BEYOND: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    IN_ORDER: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAX_FINITE: tl.constexpr,
    LATE_QUERY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_Q: tl.constexpr = NUM_KV * GROUP_HEADS
    lanes = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    out_dims = tl.arange(0, BLOCK_D)
    head_mask = lanes < GROUP_HEADS
    q_mask = head_mask[:, None] & (dims < D)[None, :]
    out_mask = head_mask[None, :] & (dims < D)[:, None]
    if PDL:
        gdc_launch_dependents()
    # Work list, lengths and tables are older than the kernel before this one (see paged_decode):
    # they are read, and with LATE_QUERY the first keys and values loaded, before the wait.
    first, step = tl.program_id(0), tl.num_programs(0)
    num_work = tl.load(counts_ptr, cache_modifier=".cg") * NUM_KV
    is_live = first < num_work
    entry, span, slot = load_item(items_ptr, first, is_live, NUM_KV)
    seq_len, row = load_row(seq_len_ptr, row_ptr, entry, is_live)
    cos, sin, q_weight, q_partners, k_weight, k_partners = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if NEW_TOKENS:
        cos, sin = load_angles(cos_ptr, sin_ptr, seq_len - 1, dims, is_live, D)
        if HAS_NORM:
            q_weight, q_partners = load_norm(q_norm_ptr, dims, D)
            k_weight, k_partners = load_norm(k_norm_ptr, dims, D)
    if PREFETCH:
        prefetch_tile(
            k_ptr, v_ptr, block_table_ptr + row * table_stride, (first % NUM_KV) * D,
            (span >> 32).to(tl.int32), seq_len, is_live, stride_block, stride_token,
            BLOCK_SIZE, TILE, BLOCK_D,
        )  # fmt: skip
    if PDL and not LATE_QUERY:
        gdc_wait()
    for work in range(first, num_work, step):
        kv_head = work % NUM_KV
        begin = tl.where(window > 0, tl.maximum(seq_len - window, 0), 0)
        tiles = (seq_len + TILE - 1) // TILE - begin // TILE
        first_tile = (span >> 32).to(tl.int32)
        end_tile = span.to(tl.int32)
        table_at = block_table_ptr + row * table_stride
        q_heads = kv_head * GROUP_HEADS + lanes
        qkv_at = q_ptr + entry.to(tl.int64) * q_stride
        k_at = qkv_at + (NUM_Q + kv_head) * D + tl.zeros([1, 1], tl.int32)
        v_at = qkv_at + (NUM_Q + NUM_KV + kv_head) * D + out_dims
        m = tl.full([BLOCK_H], float("-inf") if IN_ORDER else -1e30, tl.float32)
        l = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
        num_cached = seq_len
        is_new = False
        if NEW_TOKENS:
            num_cached = seq_len - 1
            is_new = end_tile * TILE >= seq_len  # of this item
            new_block = tl.load(table_at + num_cached // BLOCK_SIZE, mask=is_new, other=0)
            # One tile at least, though it has no key that counts: the loop loads the query.
            end_tile = tl.minimum(end_tile, (num_cached + TILE - 1) // TILE)
            end_tile = tl.maximum(end_tile, first_tile + 1)
        # The next item's fields arrive while this one is worked on.
        is_more = work + step < num_work
        next_entry, next_span, next_slot = load_item(items_ptr, work + step, is_more, NUM_KV)
        m, l, acc, q, raw_k, k_partner, raw_v = fold_tiles(
            (qkv_at + q_heads[:, None] * D, k_at, v_at), q_mask, is_new,
            (cos, sin, q_weight, q_partners, eps),
            k_tiles, v_tiles, table_at, kv_head * D, first_tile, end_tile,
            begin, num_cached, scale_log2, stride_block, stride_token, dims,
            group_tiles(tiles, UP_TO_16, UP_TO_64, BEYOND), m, l, acc,
            BLOCK_SIZE, TILE, D, BLOCK_H, BLOCK_D, STAGES, DOT_PRECISION, TMA, IN_ORDER,
            NEW_TOKENS, HAS_NORM, LATE_QUERY, PDL,
        )  # fmt: skip
        next_seq_len, next_row = load_row(seq_len_ptr, row_ptr, next_entry, is_more)
        if NEW_TOKENS:
            k = turn(raw_k, k_partner, cos, sin, k_weight, k_partners, eps, D, HAS_NORM)
            v = finite(raw_v.to(tl.float32), MAX_FINITE).to(k.dtype)
            to = new_block.to(tl.int64) * stride_block + kv_head * D
            to += (num_cached % BLOCK_SIZE) * stride_token
            keep_new_token(k_ptr, v_ptr, to, k, v, dims, is_new, D, BLOCK_D)
            m, l, acc = add_new_token(m, l, acc, q, k, v, is_new, scale_log2)
            cos, sin = load_angles(cos_ptr, sin_ptr, next_seq_len - 1, dims, is_more, D)
        if slot >= 0:
            at = slot.to(tl.int64) * NUM_Q + q_heads
            tl.store(max_sum_ptr + at * 2, m, mask=head_mask)
            tl.store(max_sum_ptr + at * 2 + 1, l, mask=head_mask)
            tl.store(acc_ptr + at[None, :] * D + dims[:, None], acc, mask=out_mask)
        else:
            out = (acc / tl.where(head_mask, l, 1.0)[None, :]).to(out_ptr.dtype.element_ty)
            out_at = out_ptr + entry.to(tl.int64) * out_stride + q_heads[None, :] * D
            tl.store(out_at + dims[:, None], out, mask=out_mask)
        entry, span, slot = next_entry, next_span, next_slot
        seq_len, row = next_seq_len, next_row
    if PDL:
        gdc_wait()  # where there was no work; else it was waited for


def paged_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    scale: float,
    window: int = 0,
    pdl: bool = False,
    new_tokens: NewTokens | None = None,
) -> None:
    """out[b] = softmax(q[b] K^T * scale) V over the cached tokens of entry b, for one new token
    per entry.

    Values in the cache must be finite, also where nobody has written yet. Entries with seq_len 0
    are not in the plan: their output is left alone. The new token's k and v must be in the cache.
    With a plan in order the result of an entry depends on its own tokens and the plan's tile only,
    to the last bit. With pdl, the plan, lengths, rows and block tables are read before the wait for
    the kernel before, and with new_tokens so is the cache: they must have been written by work that
    a launch without pdl has waited for since (that launch may be plan_decode itself, when at least
    one kernel lies between it and this one).

    Args:
        out: [B, HQ, D], last two dimensions contiguous; written. q: the same, read (may be a view
            of packed qkv rows).
        k_cache, v_cache: [num_blocks, block_size, HKV, D], contiguous, dtype of q.
        block_tables: int32 [max rows, max blocks].
        rows: int32 [B], row of each entry in block_tables. seq_lens: int32 [B], tokens of each
            entry including the new one; the lengths `plan` was filled for.
        plan: filled by plan_decode with the same window and tile length. workspace: from
            new_decode_workspace for it. scale: usually D ** -0.5.
        window: sliding window in tokens, the query's own included; 0: none.
        pdl: launch while the kernel before still runs.
        new_tokens: q is a view of packed qkv rows as they come from the projection (q heads, k
            heads, v heads): turn queries and keys, and keep each entry's k and v in the cache, at
            position seq_len - 1, as `rope_kv_write` would. Not with a plan in order.

    Raises:
        ValueError: new_tokens together with a plan in order.
    """
    if new_tokens is not None and plan.in_order:
        raise ValueError("paged_decode takes new tokens only where the order of sums is free")
    _, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group_heads = num_q_heads // num_kv_heads
    tile = plan.tile
    tma = tile.tma and takes_tiles(k_cache, tile.tile_tokens)
    options = pdl_options(out, pdl)
    _paged_decode_kernel[(plan.num_programs,)](
        out,
        q,
        k_cache,
        v_cache,
        cache_tiles(k_cache, tile.tile_tokens) if tma else k_cache,
        cache_tiles(v_cache, tile.tile_tokens) if tma else v_cache,
        block_tables,
        rows,
        seq_lens,
        plan.items,
        plan.counts,
        workspace.acc,
        workspace.max_sum,
        *new_token_arguments(q, new_tokens),
        scale * LOG2_E,
        window,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        NUM_KV=num_kv_heads,
        GROUP_HEADS=group_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=max(8, triton.next_power_of_2(group_heads)),
        BLOCK_SIZE=block_size,
        TILE=tile.tile_tokens,
        UP_TO_16=tile.groups.up_to_16,
        UP_TO_64=tile.groups.up_to_64,
        BEYOND=tile.groups.beyond,
        STAGES=fitting_stages(tile.num_stages, tile_bytes(k_cache, tile.tile_tokens)),
        DOT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        TMA=tma,
        IN_ORDER=plan.in_order,
        NEW_TOKENS=new_tokens is not None,
        HAS_NORM=new_tokens is not None and new_tokens.q_norm is not None,
        MAX_FINITE=torch.finfo(q.dtype).max,
        # Not where the cache has a token of the kernel before, nor where registers are short.
        LATE_QUERY=new_tokens is not None and q.element_size() == 2,
        # The only row has some tile or other in each program: loaded as soon as it is asked for.
        PREFETCH=options["PDL"] and len(out) > 1,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers or None,
        **options,
    )
    join_partials(out, plan, workspace, options)


def paged_decode_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests); NaN for entries without tokens."""
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    group_heads = num_q_heads // k_cache.shape[2]
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=q.device)
    for entry, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        k, v = (
            gather_kv(cache, block_tables[int(rows[entry])], seq_len).to(dtype)
            for cache in (k_cache, v_cache)
        )
        begin = max(seq_len - window, 0) if window > 0 else 0
        k = k[begin:].repeat_interleave(group_heads, dim=1)
        v = v[begin:].repeat_interleave(group_heads, dim=1)
        scores = torch.einsum("hd,khd->hk", q[entry].to(dtype), k) * scale
        out[entry] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    return out.reshape(-1, num_q_heads, head_dim)
