"""What attention turns new tokens with, and queries of prompts turned when they are loaded (of
decode rows: `kernels.decode_new_token`).

That saves writing queries and reading them again. Rotation and norm are those of `kernels.rope`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.decode_new_token import load_heads, load_norm, turn


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
    """Heads [H, BLOCK_D] of many tokens at pointers heads_at [H, 1], normed and turned, in their
    dtype. lane_mask [H, 1]: which are there. cos_at, sin_at [H, 1]: of each one's position; valid
    for the others too."""
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
        angles = tl.where(dims < D // 2, dims, dims - D // 2)[None, :]
        cos = tl.load(cos_at + angles, mask=(dims < D)[None, :], other=0.0)
        sin = tl.load(sin_at + angles, mask=(dims < D)[None, :], other=0.0)
        sin = tl.where((dims < D // 2)[None, :], -sin, sin)
        x, partner = load_heads(heads_at, lane_mask & (dims < D)[None, :], dims, D)
        weight, partner_weight = 0.0, 0.0
        if HAS_NORM:
            weight, partner_weight = load_norm(norm_ptr, dims, D)
        turned = turn(x, partner, cos, sin, weight, partner_weight, eps, D, HAS_NORM)
    return turned


@triton.jit
def load_queries(
    q_at,
    mask,
    positions,
    dims,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Queries [M, BLOCK_D] at pointers q_at [M, 1], with TURNS normed and turned to their
    positions [M]."""
    if TURNS:
        angles = positions.to(tl.int64)[:, None] * (D // 2)
        q = load_turned_queries(
            q_at, mask, dims, cos_ptr + angles, sin_ptr + angles, norm_ptr, eps,
            D, BLOCK_D, HAS_NORM,
        )  # fmt: skip
    else:
        q = tl.load(q_at + dims[None, :], mask=mask & (dims < D)[None, :], other=0.0)
    return q
