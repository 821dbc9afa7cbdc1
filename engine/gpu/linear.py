"""Which product runs where: ours for few rows, cuBLAS for many, fixed tiles if deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.deferred_norm import NextNorm, ScaledInput
from kernels.fixed_gemm import fixed_linear
from kernels.fixed_tiles import has_glu_tile
from kernels.norm import norm_parts
from kernels.small_gemm import small_linear
from kernels.split_k import GemmWorkspace

MAX_FUSED_ROWS = 64
"""Up to here one launch of ours does norm, product and residual, and beats cuBLAS's three, in
models of any size; `kernels.product_tiles.max_fused_rows` says how far it does in this one."""

GLU_FROM_ROWS = 2048
"""From here on fixed tiles with the activation in their end take the place of cuBLAS and a launch
for the activation, for weights whose tiles the sweep has measured: prompts of Qwen3-8B's shape are
1 % faster on an H200."""


@dataclass(frozen=True, slots=True)
class Linears:
    """x W^T in the flavour this engine was configured for."""

    deterministic: bool
    workspace: GemmWorkspace
    max_fused_rows: int = MAX_FUSED_ROWS

    def is_fused(self, num_rows: int) -> bool:
        """Whether `fused` takes this many rows."""
        return not self.deterministic and num_rows <= self.max_fused_rows

    def shares_norms(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Whether fused products of this many rows have the norms between them in their ends.

        dtype: of activations. One row has them in the products' beginnings, and an output times the
        norm's weight may be beyond what float16 holds.
        """
        return self.is_fused(num_rows) and num_rows > 1 and dtype != torch.float16

    def glu_is_ours(self, num_rows: int, weight: torch.Tensor) -> bool:
        """Whether `fixed` also takes gate and up [2N, K] of this many rows, with the activation."""
        if self.deterministic:
            return True
        if num_rows < GLU_FROM_ROWS or weight.dtype.itemsize != 2:
            return False
        return has_glu_tile(num_rows, weight.shape[0] // 2, weight.shape[1])

    def norm_parts(self, num_rows: int, n: int, k: int) -> int:
        """Parts of K that `plain_parts` cuts a product of so many rows and a weight [n, k] before a
        norm into; 1: it is as quick whole."""
        return 1 if self.deterministic else norm_parts(num_rows, n, k)

    def fused(
        self,
        out: torch.Tensor,
        x: torch.Tensor | ScaledInput,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        norm_scratch: torch.Tensor | None = None,
        glu: bool = False,
        residual: torch.Tensor | None = None,
        next_norm: NextNorm | None = None,
    ) -> ScaledInput | None:
        """out = f(x) W^T + bias + residual; see `kernels.small_gemm.small_linear`."""
        return small_linear(
            out, x, weight, self.workspace,
            bias=bias, norm_weight=norm_weight, eps=eps, norm_scratch=norm_scratch, glu=glu,
            residual=residual, next_norm=next_norm,
        )  # fmt: skip

    def fixed(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        glu: bool = False,
        residual: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """out = x W^T + bias + residual; see `kernels.fixed_gemm.fixed_linear`."""
        fixed_linear(
            out, x, weight,
            bias=bias, residual=residual, workspace=self.workspace, pdl=pdl, glu=glu,
        )  # fmt: skip

    def plain(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """out [M, N] = x [M, K] W^T + bias or residual, for any M; out is float32 or the dtype of
        x, and may be the residual.

        pdl: launch while the kernel before still runs, where the product is ours.

        Raises:
            ValueError: bias and residual together, or one of them and out of another dtype than x.
        """
        if (bias is not None) + (residual is not None) + (out.dtype != x.dtype) > 1:
            raise ValueError("plain takes one of bias, residual and an out of another dtype than x")
        if self.deterministic:
            self.fixed(out, x, weight, bias=bias, residual=residual, pdl=pdl)
            return
        added = residual if residual is not None else bias
        if out.dtype != x.dtype:
            torch.ops.aten.mm.dtype_out(x, weight.t(), out.dtype, out=out)
        elif added is not None:
            torch.addmm(added, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def plain_parts(self, parts: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """parts float32 [P, M, N] = products of P equal pieces of K of x [M, K] and weight [N, K],
        whose sum is x W^T; P divides K. One call of cuBLAS."""
        count, (rows, k), columns = len(parts), x.shape, len(weight)
        pieces = x.view(rows, count, k // count).transpose(0, 1)
        weights = weight.view(columns, count, k // count).permute(1, 2, 0)
        if x.dtype == parts.dtype:
            torch.bmm(pieces, weights, out=parts)
        else:
            torch.ops.aten.bmm.dtype_out(pieces, weights, parts.dtype, out=parts)
