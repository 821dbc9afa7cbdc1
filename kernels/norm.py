"""RMSNorm with the residual addition before it. Reads and writes each row once, arithmetic in
float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    residual_ptr,
    x_ptr,
    weight_ptr,
    num_columns,
    out_stride,
    residual_stride,
    x_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_begin(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * residual_stride + columns
        total = x + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        # The norm sees the rounded sum, the one that the next layer reads.
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out = h / sqrt(mean(h^2) + eps) * weight, with h = x + residual where a residual is given
    (h is kept in it).

    Args:
        out: [T, N], last dimension contiguous; written. May be x.
        x: [T, N], last dimension contiguous.
        weight: [N].
        eps: added to the mean square.
        residual: [T, N], last dimension contiguous; read, and overwritten with h.
        pdl: launch while the kernel before still runs.
    """
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    _rms_norm_kernel[(num_rows,)](
        out,
        residual if residual is not None else x,
        x,
        weight,
        num_columns,
        out.stride(0),
        residual.stride(0) if residual is not None else 0,
        x.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(out, pdl),
    )


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, float32 inside: (normed, h), both of x's dtype."""
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h32 = h.float()
    scale = torch.rsqrt(h32.square().mean(-1, keepdim=True) + eps)
    return (h32 * scale * weight.float()).to(x.dtype), h
