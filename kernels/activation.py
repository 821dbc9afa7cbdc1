"""SiLU of the gate times the up projection, from one packed row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options


@triton.jit
def silu_mul_values(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(
    out_ptr, x_ptr, num_columns, out_stride, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    pdl_begin(PDL)
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + num_columns + columns, mask=mask, other=0.0)
    out = silu_mul_values(gate, up.to(tl.float32))
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor, pdl: bool = False) -> None:
    """out = silu(gate) * up.

    Args:
        out: [T, N], last dimension contiguous; written.
        gate_up: [T, 2 N], gate first; last dimension contiguous.
        pdl: launch while the kernel before still runs.
    """
    num_rows, num_columns = out.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    grid = (num_rows, triton.cdiv(num_columns, block))
    _silu_mul_kernel[grid](
        out,
        gate_up,
        num_columns,
        out.stride(0),
        gate_up.stride(0),
        BLOCK=block,
        num_warps=4,
        **pdl_options(out, pdl),
    )


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch, float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
