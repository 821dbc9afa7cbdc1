"""Rotary embedding, optional q/k norm and the KV write, in one pass over packed qkv rows.

q heads are rotated in place, k heads go rotated into the paged cache, v heads are copied there. Or
q heads are left alone, where attention rotates them as it loads them.
Values are kept finite: attention multiplies those of slots that do not count by zero, and a block
passes from one job to the next.
Rotation is the half-split form (Llama, Qwen): pairs are (i, i + D/2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options


@triton.jit
def finite(x, LARGEST: tl.constexpr):
    """x within -LARGEST .. LARGEST; NaN becomes LARGEST."""
    return tl.clamp(tl.where(x == x, x, LARGEST), -LARGEST, LARGEST)


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    cache_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    WITH_QUERIES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAX_FINITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes BLOCK_HEADS heads of one token."""
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if not WITH_QUERIES:
        heads += NUM_Q
    halves = tl.arange(0, BLOCK_HALF)
    half_mask = halves < HALF
    mask = (heads < NUM_Q + 2 * NUM_KV)[:, None] & half_mask[None, :]
    is_q = (heads < NUM_Q)[:, None]
    is_v = (heads >= NUM_Q + NUM_KV)[:, None]
    if HAS_NORM:
        if WITH_QUERIES:
            q_low = tl.load(q_norm_ptr + halves, mask=half_mask, other=0.0).to(tl.float32)
            q_high = tl.load(q_norm_ptr + HALF + halves, mask=half_mask, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + halves, mask=half_mask, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + halves, mask=half_mask, other=0.0).to(tl.float32)
    pdl_begin(PDL)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int64)
    if slot >= 0:
        angle_at = position * HALF + halves
        cos = tl.load(cos_ptr + angle_at, mask=half_mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle_at, mask=half_mask, other=0.0).to(tl.float32)
        at = qkv_ptr + token * qkv_stride + heads[:, None] * D + halves[None, :]
        low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            mean_square = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D
            scale = tl.rsqrt(mean_square + eps)[:, None]
            low_weight, high_weight = k_low[None, :], k_high[None, :]
            if WITH_QUERIES:
                low_weight = tl.where(is_q, q_low[None, :], low_weight)
                high_weight = tl.where(is_q, q_high[None, :], high_weight)
            low = tl.where(is_v, low, low * scale * low_weight)
            high = tl.where(is_v, high, high * scale * high_weight)
        dtype = qkv_ptr.dtype.element_ty
        turned_low = low * cos[None, :] - high * sin[None, :]
        turned_high = high * cos[None, :] + low * sin[None, :]
        new_low = tl.where(is_v, finite(low, MAX_FINITE), turned_low).to(dtype)
        new_high = tl.where(is_v, finite(high, MAX_FINITE), turned_high).to(dtype)
        cache_at = slot * cache_stride + halves[None, :]
        k_at = k_cache_ptr + cache_at + (heads - NUM_Q)[:, None] * D
        v_at = v_cache_ptr + cache_at + (heads - NUM_Q - NUM_KV)[:, None] * D
        to = tl.where(is_v, v_at, k_at)
        if WITH_QUERIES:
            to = tl.where(is_q, at, to)
        tl.store(to, new_low, mask=mask)
        tl.store(to + HALF, new_high, mask=mask)


_BLOCK_HEADS = 8
_MOST_KV_HEADS = 16


def rope_kv_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_q_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
    with_queries: bool = True,
) -> None:
    """Norm and rotate q in place, k into the paged cache, and copy v there, v within the finite
    numbers of its type. Tokens with slot -1 are left alone.

    Args:
        qkv: [T, (HQ + 2 HKV) * D], last dimension contiguous: q heads, k heads, v heads. q is
            overwritten, or neither read nor written without queries.
        k_cache, v_cache: [num_blocks, block_size, HKV, D], contiguous, dtype of qkv; slots are
            written.
        cos, sin: float32 [max_len, D / 2], contiguous.
        positions: int32 [T]. slots: int32 [T], block_id * block_size + offset, or -1.
        num_q_heads: HQ.
        q_norm, k_norm: [D] weights of the RMS norm over each head before the rotation; both or
            none.
        eps: of that norm.
        pdl: launch while the kernel before still runs.
        with_queries: False: keys and values only.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    has_norm = q_norm is not None and k_norm is not None
    num_heads, block_heads = num_q_heads + 2 * num_kv_heads, _BLOCK_HEADS
    if not with_queries:  # a token's angles are loaded once for all of its heads, or 16
        num_heads = 2 * num_kv_heads
        block_heads = min(triton.next_power_of_2(num_heads), _MOST_KV_HEADS)
    grid = (num_tokens, triton.cdiv(num_heads, block_heads))
    _rope_kv_write_kernel[grid](
        qkv,
        k_cache,
        v_cache,
        cos,
        sin,
        positions,
        slots,
        q_norm if has_norm else cos,
        k_norm if has_norm else cos,
        qkv.stride(0),
        k_cache.stride(1),
        eps,
        NUM_Q=num_q_heads,
        NUM_KV=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        WITH_QUERIES=with_queries,
        HAS_NORM=has_norm,
        MAX_FINITE=torch.finfo(qkv.dtype).max,
        num_warps=max(block_heads // 4, 1),  # 16 bytes of each half a thread, where D is 128
        **pdl_options(qkv, pdl),
    )


def rope_ref(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm and rotate heads x [T, H, D] in torch, float32 inside; returns x's dtype."""
    x32 = x.float()
    if norm is not None:
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * norm.float()
    low, high = x32.chunk(2, dim=-1)
    c = cos[positions.long()].float()[:, None]
    s = sin[positions.long()].float()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(x.dtype)


def rope_tables(
    head_dim: int, max_len: int, inv_freq: torch.Tensor | None = None, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of cos and sin, float32 [max_len, head_dim / 2], computed in float64.

    Args:
        head_dim: D. max_len: number of positions.
        inv_freq: [D / 2] angular frequencies after any scaling; None: theta ** (-2 i / D).
    """
    if inv_freq is None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        inv_freq = theta**-exponents
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), inv_freq.double().cpu())
    return angles.cos().float(), angles.sin().float()
