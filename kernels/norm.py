"""RMSNorm. Reads and writes each row once, arithmetic in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options


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
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    out = x * scale * weight
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


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests)."""
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale * weight.to(dtype)
