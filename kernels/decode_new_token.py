"""A decode row's new token inside of decode attention: its query turned, its key turned and kept
with its value, and its share of the softmax. Saves a launch in every layer.

Rotation and norm are those of `kernels.rope`. What does not come from the kernel before, angles
and norms, is loaded apart from what does, so that it is there when the wait is over; and the token
comes last into the softmax, so that the loop over the cache waits for its query alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, dims, is_live, D: tl.constexpr):
    """What turns the heads of a position: cos and signed sin float32 [1, BLOCK_D]. A number is
    turned by its partner, half a head away: x * cos + partner * sin."""
    HALF: tl.constexpr = D // 2
    at = position.to(tl.int64) * HALF + tl.where(dims < HALF, dims, dims - HALF)
    mask = (dims < D) & is_live
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    return cos[None, :], tl.where(dims < HALF, -sin, sin)[None, :]


@triton.jit
def load_norm(norm_ptr, dims, D: tl.constexpr):
    """A norm's weights, and those of the partners, float32 [BLOCK_D]."""
    HALF: tl.constexpr = D // 2
    mask = dims < D
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    weight = tl.load(norm_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    return weight, tl.load(norm_ptr + partners, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_heads(heads_at, mask, dims, D: tl.constexpr):
    """Raw heads [H, BLOCK_D] at pointers heads_at [H, 1], and their partners."""
    HALF: tl.constexpr = D // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    x = tl.load(heads_at + dims[None, :], mask=mask, other=0.0)
    return x, tl.load(heads_at + partners[None, :], mask=mask, other=0.0)


@triton.jit
def turn(
    x, partner, cos, sin, weight, partner_weight, eps, D: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads as `load_heads` gives them, normed and turned, in their dtype. cos, sin float32
    [1 or H, BLOCK_D]."""
    x32 = x.to(tl.float32)
    partner32 = partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / D + eps)[:, None]
        x32 = x32 * scale * weight[None, :]
        partner32 = partner32 * scale * partner_weight[None, :]
    return (x32 * cos + partner32 * sin).to(x.dtype)


@triton.jit
def nothing_loaded(dtype: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `load_turned` returns, of zeros."""
    row = tl.zeros([1, BLOCK_D], dtype)
    return tl.zeros([BLOCK_H, BLOCK_D], dtype), row, row, tl.zeros([BLOCK_D], dtype)


@triton.jit
def load_turned(
    heads_at,
    q_mask,
    is_new,
    turns,
    dims,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NEW_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The query [H, BLOCK_D], and the new token of its row.

    heads_at: pointers to the heads [H, 1] of the query, the new token's key [1, 1] and value
    [BLOCK_D]. NEW_TOKENS: they are raw, and turned here by turns: cos and sin of `load_angles`,
    weights of `load_norm`, eps; else only the query is loaded. is_new: the new token is asked for.

    Returns the query, and the raw key and its partners [1, BLOCK_D] and the value [BLOCK_D], zeros
    where they were not asked for.
    """
    q_at, k_at, v_at = heads_at
    q, raw_k, k_partner, raw_v = nothing_loaded(q_at.dtype.element_ty, q_at.shape[0], BLOCK_D)
    if NEW_TOKENS:
        cos, sin, weight, partner_weight, eps = turns
        row_dims = tl.arange(0, BLOCK_D)
        raw, partner = load_heads(q_at, q_mask, dims, D)
        raw_k, k_partner = load_heads(k_at, ((dims < D) & is_new)[None, :], dims, D)
        raw_v = tl.load(v_at, mask=(row_dims < D) & is_new, other=0.0)
        q = turn(raw, partner, cos, sin, weight, partner_weight, eps, D, HAS_NORM)
    else:
        q = tl.load(q_at + dims[None, :], mask=q_mask, other=0.0)
    return q, raw_k, k_partner, raw_v


@triton.jit
def keep_new_token(k_ptr, v_ptr, to, k, v, dims, is_here, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where is_here: write a key [1, BLOCK_D] and a value [BLOCK_D] to the cache, at offset to."""
    row_dims = tl.arange(0, BLOCK_D)
    tl.store(k_ptr + to + dims[None, :], k, mask=((dims < D) & is_here)[None, :])
    tl.store(v_ptr + to + row_dims, v, mask=(row_dims < D) & is_here)


@triton.jit
def add_new_token(m, l, acc, q, k, v, is_here, scale_log2):
    """Where is_here: add a token to the softmax in base 2: maximum m, finite, and sum l [heads],
    weighted values acc [D, heads]. q [heads, D] and k [1, D]: turned; v [D]."""
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
    m_new = tl.where(is_here, tl.maximum(m, s), m)
    alpha = tl.exp2(m - m_new)
    p = tl.where(is_here, tl.exp2(s - m_new), 0.0)
    acc = acc * alpha[None, :] + v.to(tl.float32)[:, None] * p[None, :]
    return m_new, l * alpha + p, acc
