"""Linear layers of up to 16 rows whose weights are read whole before the wait.

Each program holds its rows of the weight in registers: K is cut into parts side by side, one a
warp, multiplied as a batch and summed at the end. With programmatic dependent launch every byte of
the weight is on its way while the kernel before still runs; behind the wait there is only x, which
comes from the L2 cache, and one round of products. For small models, where a pipelined loop spends
its time filling the pipeline.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation import silu_mul_values
from kernels.pdl import pdl_options
from kernels.tiles import PreloadedTile

MAX_PRELOADED_M = 16


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _preloaded_gemm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    out_stride,
    x_stride,
    weight_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    tokens = tl.arange(0, BLOCK_M)
    token_mask = tokens < num_tokens
    # [parts, 1, part]: columns of x and of the weight
    columns = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    column_mask = columns < K
    weight_mask = column_mask & row_mask[None, :, None]
    weight_at = weight_ptr + rows.to(tl.int64)[None, :, None] * weight_stride + columns
    w = tl.load(weight_at, mask=weight_mask, other=0.0)
    if GLU:
        up_at = weight_at + num_rows.to(tl.int64) * weight_stride
        w_up = tl.load(up_at, mask=weight_mask, other=0.0)
    if HAS_NORM:
        norm = tl.load(norm_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x_at = x_ptr + tokens.to(tl.int64)[None, :, None] * x_stride + columns
    x = tl.load(x_at, mask=column_mask & token_mask[None, :, None], other=0.0)
    mask = token_mask[:, None] & row_mask[None, :]
    long_tokens = tokens.to(tl.int64)[:, None]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + long_tokens * residual_stride + rows[None, :]
        residual = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x32 = x.to(tl.float32)
        square = tl.sum(tl.sum(x32 * x32, axis=2), axis=0)
        x = (x32 * norm).to(x.dtype)
    y = tl.sum(tl.dot(x, tl.permute(w, (0, 2, 1))), axis=0)
    if GLU:
        up = tl.sum(tl.dot(x, tl.permute(w_up, (0, 2, 1))), axis=0)
    if HAS_NORM:
        # The row's scale is one factor of the whole sum: applied once, in float32.
        scale = tl.rsqrt(square / K + eps)[:, None]
        y *= scale
        if GLU:
            up *= scale
    if GLU:
        y = silu_mul_values(y, up)
    if HAS_BIAS:
        y += bias[None, :]
    if HAS_RESIDUAL:
        y += residual
    out_at = out_ptr + long_tokens * out_stride + rows[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


def preloaded_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: PreloadedTile,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = True,
) -> None:
    """out = f(x) W^T + bias + residual for at most MAX_PRELOADED_M rows; see
    small_gemm.small_linear for f, glu and the shapes."""
    num_rows, k = weight.shape
    if glu:
        num_rows //= 2
    _preloaded_gemm_kernel[(triton.cdiv(num_rows, tile.block_n),)](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        norm_weight if norm_weight is not None else weight,
        residual if residual is not None else x,
        x.shape[0],
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        residual.stride(0) if residual is not None else 0,
        eps,
        K=k,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GLU=glu,
        BLOCK_M=16,
        BLOCK_N=tile.block_n,
        PARTS=tile.num_warps,
        PART=max(triton.next_power_of_2(triton.cdiv(k, tile.num_warps)), 16),
        num_warps=tile.num_warps,
        **pdl_options(out, pdl),
    )
