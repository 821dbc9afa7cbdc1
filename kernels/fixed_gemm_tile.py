"""One tile of the batch-invariant GEMM: where it lies, its sum over a part of K, and its end. The
small GEMM takes the sum from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation import silu_mul_values


@triton.jit
def place_tile(
    tile, num_tokens, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Row tile and column tile of a tile's number."""
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(num_rows, BLOCK_N)
    group = tile // (GROUP * num_n)
    group_m = tl.minimum(num_m - group * GROUP, GROUP)
    rest = tile % (GROUP * num_n)
    return group * GROUP + rest % group_m, rest // group_m


@triton.jit
def sum_by_pointers(
    x_at,
    weight_at,
    up_at,
    token_mask,
    k_begin,
    k_end,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    GLU: tl.constexpr,
):
    """One tile of x W^T over K from k_begin to k_end, and with GLU that of the up projection (zeros
    without). x_at [BLOCK_M, BLOCK_K], weight_at, up_at [BLOCK_N, BLOCK_K]: the first columns;
    token_mask [BLOCK_M, 1]: which rows of x are there."""
    columns = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        in_k = (k + columns < K)[None, :]
        if K % BLOCK_K == 0:
            w = tl.load(weight_at + k)
            a = tl.load(x_at + k, mask=token_mask, other=0.0)
        else:
            w = tl.load(weight_at + k, mask=in_k, other=0.0)
            a = tl.load(x_at + k, mask=token_mask & in_k, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=DOT_PRECISION)
        if GLU:
            if K % BLOCK_K == 0:
                w_up = tl.load(up_at + k)
            else:
                w_up = tl.load(up_at + k, mask=in_k, other=0.0)
            up_acc = tl.dot(a, tl.trans(w_up), up_acc, input_precision=DOT_PRECISION)
    return acc, up_acc


@triton.jit
def sum_by_descriptors(
    x,
    weight,
    tile_m,
    tile_n,
    k_begin,
    k_end,
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    GLU: tl.constexpr,
):
    """The same tile by descriptors; the up projection's rows of W begin at num_rows."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        a = x.load([tile_m * BLOCK_M, k])
        w = weight.load([tile_n * BLOCK_N, k])
        acc = tl.dot(a, tl.trans(w), acc, input_precision=DOT_PRECISION)
        if GLU:
            w_up = weight.load([num_rows + tile_n * BLOCK_N, k])
            up_acc = tl.dot(a, tl.trans(w_up), up_acc, input_precision=DOT_PRECISION)
    return acc, up_acc


@triton.jit
def sum_tile(
    x,
    weight,
    tile_m,
    tile_n,
    k_begin,
    k_end,
    num_tokens,
    num_rows,
    x_stride,
    weight_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    GLU: tl.constexpr,
):
    """One tile of x W^T over K from k_begin to k_end, and with GLU that of the rows of W that begin
    at num_rows (zeros without); x and weight are pointers or descriptors."""
    if TMA:
        acc, up_acc = sum_by_descriptors(
            x, weight, tile_m, tile_n, k_begin, k_end, num_rows,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, GLU,
        )  # fmt: skip
    else:
        tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        # Rows of the weight past the end read the last one; their results are not stored.
        rows = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), num_rows - 1).to(tl.int64)
        columns = tl.arange(0, BLOCK_K)
        weight_at = weight + rows[:, None] * weight_stride + columns[None, :]
        acc, up_acc = sum_by_pointers(
            x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :],
            weight_at, weight_at + num_rows.to(tl.int64) * weight_stride,
            (tokens < num_tokens)[:, None], k_begin, k_end,
            K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, GLU,
        )  # fmt: skip
    return acc, up_acc


@triton.jit
def store_tile(
    acc,
    up_acc,
    tile_m,
    tile_n,
    out_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    out_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """acc, or with GLU silu(acc) * up_acc, + bias + residual, rounded once."""
    tokens = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    if GLU:
        acc = silu_mul_values(acc, up_acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + tokens[:, None] * residual_stride + rows[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + tokens[:, None] * out_stride + rows[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
