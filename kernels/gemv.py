"""Matrix times vector for one decode row, with its neighbours fused and its weights read ahead.

Bound by the bytes of the weights. One program computes BLOCK_N outputs over the whole K with wide
tiles and float32 accumulators, and one sum at the end. With programmatic dependent launch the
first weight tile is in flight before the wait for the kernel that makes x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation import silu_mul_values
from kernels.pdl import pdl_options
from kernels.product_tiles import GemvTile, gemv_tile


@triton.jit
def _gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    num_rows,
    weight_stride,
    eps,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    columns = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    first_mask = row_mask[:, None] & (columns < K)[None, :]
    tile = tl.load(weight_at, mask=first_mask, other=0.0)
    up_at = weight_at + num_rows.to(tl.int64) * weight_stride
    if GLU:
        up_tile = tl.load(up_at, mask=first_mask, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if HAS_RESIDUAL:  # its way takes as long as the product's
        residual = tl.load(residual_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        here = k + columns
        mask = here < K
        x = tl.load(x_ptr + here, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            square += x * x
            x *= tl.load(norm_ptr + here, mask=mask, other=0.0).to(tl.float32)
        current = tile
        if GLU:
            up_acc += up_tile.to(tl.float32) * x[None, :]
        if k + BLOCK_K < K:
            next_mask = row_mask[:, None] & (here + BLOCK_K < K)[None, :]
            tile = tl.load(weight_at + (k + BLOCK_K), mask=next_mask, other=0.0)
            if GLU:
                up_tile = tl.load(up_at + (k + BLOCK_K), mask=next_mask, other=0.0)
        acc += current.to(tl.float32) * x[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_NORM:
        # The row's scale is one factor of the whole sum: applied once, in float32.
        scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
        y *= scale
    if GLU:
        up = tl.sum(up_acc, axis=1)
        if HAS_NORM:
            up *= scale
        y = silu_mul_values(y, up)
    if HAS_BIAS:
        y += bias
    if HAS_RESIDUAL:
        y += residual
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_mask)


def gemv(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = True,
    tile: GemvTile | None = None,
) -> None:
    """out = f(x) W^T + bias + residual for one row; see small_gemm.small_linear for f, glu and
    the rest.

    Args:
        out: [1, N] contiguous, float32 or the dtype of x; written. May be residual.
        x: [1, K] contiguous.
        weight: [N, K], or [2 N, K] when glu; last dimension contiguous.
        bias: [N]. norm_weight: [K]. residual: [1, N]. tile: None: from the table.
    """
    num_rows, k = weight.shape
    if glu:
        num_rows //= 2
    if tile is None:
        tile = gemv_tile(num_rows, k)
    _gemv_kernel[(triton.cdiv(num_rows, tile.block_n),)](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        norm_weight if norm_weight is not None else weight,
        residual if residual is not None else x,
        num_rows,
        weight.stride(0),
        eps,
        K=k,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GLU=glu,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **pdl_options(out, pdl),
    )
