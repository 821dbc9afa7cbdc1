"""New tokens inside of attention: queries turned when they are loaded; a decode row's key turned
and kept with its value, and its own share of the softmax.

Of decode rows that saves a launch in every layer, of prompts writing queries and reading them
again. Rotation and norm are those of `kernels.rope`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.rope import finite


@dataclass(frozen=True, slots=True)
class NewTokens:
    """How queries and keys that come raw from the projection are made: cos, sin float32 [max_len,
    D / 2], contiguous; q_norm, k_norm [D] of the norm over each head before the rotation, both or
    none; eps of that norm."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6


def new_token_arguments(q: torch.Tensor, new: NewTokens | None) -> tuple[Any, ...]:
    """cos, sin, q_norm, k_norm and eps for the kernel; any pointer where there is none."""
    if new is None:
        return q, q, q, q, 0.0
    q_norm, k_norm = (q if norm is None else norm for norm in (new.q_norm, new.k_norm))
    return new.cos, new.sin, q_norm, k_norm, new.eps


@triton.jit
def load_turned(
    heads_at,
    mask,
    dims,
    cos_at,
    sin_at,
    norm_ptr,
    eps,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads [H, BLOCK_D] at pointers heads_at [H, 1], normed and turned, float32. cos_at, sin_at:
    of the token's position, or [H, 1] where each head has its own."""
    HALF: tl.constexpr = D // 2
    is_low = dims < HALF
    partners = tl.where(is_low, dims + HALF, dims - HALF)
    angles = tl.where(is_low, dims, dims - HALF)
    cos = tl.load(cos_at + angles[None, :], mask=(dims < D)[None, :], other=0.0)
    sin = tl.load(sin_at + angles[None, :], mask=(dims < D)[None, :], other=0.0)
    x = tl.load(heads_at + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(heads_at + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + partners, mask=dims < D, other=0.0).to(tl.float32)
        x = x * scale * weight[None, :]
        partner = partner * scale * partner_weight[None, :]
    return x * cos + partner * tl.where(is_low[None, :], -sin, sin)


@triton.jit
def load_turned_queries(
    heads_at,
    lane_mask,
    dims,
    cos_at,
    sin_at,
    norm_ptr,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """`load_turned` of a block of many tokens' heads: lane_mask [H, 1]: which are there; cos_at,
    sin_at [H, 1]: valid for the others too. Returns [H, BLOCK_D] of the heads' dtype."""
    dtype: tl.constexpr = heads_at.dtype.element_ty
    if D == BLOCK_D:  # by halves: each number, and each angle, is loaded once
        HALF: tl.constexpr = D // 2
        halves = tl.arange(0, HALF)
        cos = tl.load(cos_at + halves[None, :])
        sin = tl.load(sin_at + halves[None, :])
        low = tl.load(heads_at + halves[None, :], mask=lane_mask, other=0.0).to(tl.float32)
        high = tl.load(heads_at + HALF + halves[None, :], mask=lane_mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            mean_square = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D
            scale = tl.rsqrt(mean_square + eps)[:, None]
            low = low * scale * tl.load(norm_ptr + halves).to(tl.float32)[None, :]
            high = high * scale * tl.load(norm_ptr + HALF + halves).to(tl.float32)[None, :]
        turned_low = (low * cos - high * sin).to(dtype)
        turned_high = (high * cos + low * sin).to(dtype)
        turned = tl.join(turned_low, turned_high).permute(0, 2, 1).reshape(heads_at.shape[0], D)
    else:
        mask = lane_mask & (dims < D)[None, :]
        turned = load_turned(
            heads_at, mask, dims, cos_at, sin_at, norm_ptr, eps, D, HAS_NORM
        ).to(dtype)  # fmt: skip
    return turned


@triton.jit
def begin_with_new_token(
    q,
    qkv_at,
    k_ptr,
    v_ptr,
    table_at,
    kv_head,
    position,
    is_here,
    cos_ptr,
    sin_ptr,
    k_norm_ptr,
    eps,
    scale_log2,
    stride_block,
    stride_token,
    dims,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAX_FINITE: tl.constexpr,
):
    """Where is_here: keep the token's key and value in the cache, and return the softmax over it
    alone: maximum [heads], sum [heads], weighted values [D, heads]. Elsewhere: nothing yet.

    q [heads, D]: turned. qkv_at: the token's packed heads.
    """
    dim_mask = (dims < D) & is_here
    row_dims = tl.arange(0, BLOCK_D)
    row_mask = (row_dims < D) & is_here
    k_at = qkv_at + (NUM_Q + kv_head) * D + tl.zeros([1, 1], tl.int32)
    angle = position.to(tl.int64) * (D // 2)
    k = load_turned(
        k_at, dim_mask[None, :], dims, cos_ptr + angle, sin_ptr + angle, k_norm_ptr, eps,
        D, HAS_NORM,
    ).to(q.dtype)  # fmt: skip
    v_at = qkv_at + (NUM_Q + NUM_KV + kv_head) * D
    v = finite(tl.load(v_at + row_dims, mask=row_mask, other=0.0).to(tl.float32), MAX_FINITE)
    block_id = tl.load(table_at + position // BLOCK_SIZE, mask=is_here, other=0).to(tl.int64)
    to = block_id * stride_block + (position % BLOCK_SIZE) * stride_token + kv_head * D
    tl.store(k_ptr + to + dims[None, :], k, mask=dim_mask[None, :])
    tl.store(v_ptr + to + row_dims, v.to(q.dtype), mask=row_mask)
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
    m = tl.where(is_here, s, -1e30)
    l = tl.zeros([BLOCK_H], tl.float32) + is_here.to(tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32) + v[:, None]
    return m, l, acc
