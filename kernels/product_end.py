"""The end of a product of few rows: what becomes of its sums, once they are complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.activation import silu_mul_values
from kernels.deferred_norm import NextNorm, leave_scaled, row_factors


@dataclass(frozen=True, slots=True)
class ProductEnd:
    """Host side. bias [N], residual [M, N], squares float32 [M, tiles] of a ScaledInput, next_norm:
    None where there is none. eps: of the norm before. glu: the weight is that of gate and up."""

    bias: torch.Tensor | None
    residual: torch.Tensor | None
    squares: torch.Tensor | None
    next_norm: NextNorm | None
    eps: float
    glu: bool

    def num_outputs(self, weight: torch.Tensor) -> int:
        """N."""
        return len(weight) // (2 if self.glu else 1)

    def arguments(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, partials: torch.Tensor
    ) -> tuple[Any, ...]:
        """Of a product's kernel, from bias_ptr to eps; any pointer where there is nothing."""
        bias, residual, squares, norm = self.bias, self.residual, self.squares, self.next_norm
        return (
            bias if bias is not None else weight,
            residual if residual is not None else x,
            squares if squares is not None else partials,
            norm.weight if norm is not None else weight,
            norm.scaled if norm is not None else out,
            norm.squares if norm is not None else partials,
            partials,
            len(x),
            self.num_outputs(weight),
            out.stride(0),
            x.stride(0),
            weight.stride(0),
            residual.stride(0) if residual is not None else 0,
            squares.stride(0) if squares is not None else 0,
            norm.scaled.stride(0) if norm is not None else 0,
            norm.squares.stride(0) if norm is not None else 0,
            self.eps,
        )

    def constants(self, x: torch.Tensor) -> dict[str, Any]:
        """Of a product's kernel: its length, and what its end does."""
        return {
            "K": x.shape[1],
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "HAS_NEXT_NORM": self.next_norm is not None,
            "X_SQUARES": self.squares.shape[1] if self.squares is not None else 0,
            "GLU": self.glu,
        }


@triton.jit
def end_product(
    acc,
    up_acc,
    squares,
    bias,
    residual,
    next_norm,
    tile,
    rows,
    mask,
    out_ptr,
    out_stride,
    scaled_ptr,
    scaled_stride,
    squares_ptr,
    squares_stride,
    num_tokens,
    eps,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT_NORM: tl.constexpr,
    X_SQUARES: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store f(acc) + bias + residual, rounded once, and what the next product needs of a norm.

    acc, up_acc float32 [BLOCK_M, BLOCK_N]: sums of column tile `tile`, with GLU those of gate and
    up. rows [BLOCK_N]: its outputs. mask [BLOCK_M, BLOCK_N]: which are there. squares, bias
    [BLOCK_N], residual [BLOCK_M, BLOCK_N], next_norm [BLOCK_N]: loaded by now; any value where
    there is none.
    """
    if X_SQUARES > 0:
        factors = row_factors(squares, eps, K)[:, None]
        acc *= factors
        up_acc *= factors
    if GLU:
        acc = silu_mul_values(acc, up_acc)
    if HAS_BIAS:
        acc += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    tokens = tl.arange(0, BLOCK_M).to(tl.int64)
    out_at = out_ptr + tokens[:, None] * out_stride + rows[None, :]
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_at, rounded, mask=mask)
    if HAS_NEXT_NORM:
        leave_scaled(
            rounded, next_norm, tile, rows, mask, scaled_ptr, scaled_stride,
            squares_ptr, squares_stride, num_tokens, BLOCK_M,
        )  # fmt: skip
