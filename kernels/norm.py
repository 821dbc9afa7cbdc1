"""RMSNorm, alone and behind a product that was cut into parts of its K. Reads and writes each row
once, arithmetic in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options
from kernels.tiles import WIDE_HIDDEN


@triton.jit
def _normed(x, weight, num_columns, eps):
    """A row x float32 [BLOCK], zeros behind its columns, times weight and by its root mean
    square."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps) * weight


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_columns,
    out_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_begin(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    out = _normed(x, weight, num_columns, eps)
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool = False
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        out: [T, N], last dimension contiguous; written. May be x.
        x: [T, N], last dimension contiguous.
        weight: [N].
        eps: added to the mean square.
        pdl: launch while the kernel before still runs.
    """
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    _rms_norm_kernel[(num_rows,)](
        out,
        x,
        weight,
        num_columns,
        out.stride(0),
        x.stride(0),
        eps,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(out, pdl),
    )


MAX_NORM_PARTS = 2
MIN_PARTS_ROWS, MAX_PARTS_ROWS = 65, 256


def norm_parts(num_rows: int, n: int, k: int) -> int:
    """Parts that K is cut into where cuBLAS makes the product x [num_rows, k] weight [n, k]^T
    before a norm, so that one launch adds parts and residual and norms the sum (`add_parts_norm`);
    1: a launch for the norm alone.

    cuBLAS cuts a deep product of few tiles itself, with a launch of its own for the sum, or leaves
    processors idle. In steps of smaller models parts gain nothing.
    """
    is_deep = k >= 2 * n and n >= WIDE_HIDDEN and k % MAX_NORM_PARTS == 0
    has_rows = MIN_PARTS_ROWS <= num_rows <= MAX_PARTS_ROWS
    return MAX_NORM_PARTS if is_deep and has_rows else 1


@triton.jit
def _add_parts_norm_kernel(
    normed_ptr,
    hidden_ptr,
    part_ptr,
    weight_ptr,
    num_columns,
    normed_stride,
    hidden_stride,
    part_stride,
    part_row_stride,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_begin(PDL)
    hidden_at = hidden_ptr + row * hidden_stride + columns
    residual = tl.load(hidden_at, mask=mask, other=0.0)
    part_at = part_ptr + row * part_row_stride + columns
    total = tl.load(part_at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_at + part * part_stride, mask=mask, other=0.0)
    hidden = (residual.to(tl.float32) + total).to(residual.dtype)
    tl.store(hidden_at, hidden, mask=mask)
    normed = _normed(hidden.to(tl.float32), weight, num_columns, eps)  # of what later layers see
    out_at = normed_ptr + row * normed_stride + columns
    tl.store(out_at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def add_parts_norm(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> None:
    """hidden += sum of parts, then normed = RMSNorm(hidden) * weight, in one launch.

    Args:
        normed: [T, N], last dimension contiguous; written.
        hidden: [T, N], last dimension contiguous; the residual stream, changed.
        parts: float32 [P, T, N], last dimension contiguous: a product, cut along its K.
        weight: [N].
        eps: added to the mean square.
        pdl: launch while the kernel before still runs.
    """
    num_parts, num_rows, num_columns = parts.shape
    block = triton.next_power_of_2(num_columns)
    _add_parts_norm_kernel[(num_rows,)](
        normed, hidden, parts, weight, num_columns,
        normed.stride(0), hidden.stride(0), parts.stride(0), parts.stride(1), eps,
        PARTS=num_parts, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        **pdl_options(hidden, pdl),
    )  # fmt: skip


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests)."""
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale * weight.to(dtype)
