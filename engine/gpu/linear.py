"""Which product runs where: ours for few rows, cuBLAS for many, fixed tiles if deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fixed_gemm import fixed_linear
from kernels.small_gemm import GemmWorkspace, small_linear

MAX_FUSED_ROWS = 64
"""Up to here one launch of ours does norm, product and residual, and beats cuBLAS's three."""


@dataclass(frozen=True, slots=True)
class Linears:
    """x W^T in the flavour this engine was configured for."""

    deterministic: bool
    workspace: GemmWorkspace

    def is_fused(self, num_rows: int) -> bool:
        """Whether `fused` takes this many rows."""
        return not self.deterministic and num_rows <= MAX_FUSED_ROWS

    def fused(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        norm_scratch: torch.Tensor | None = None,
        glu: bool = False,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out = f(x) W^T + bias + residual; see `kernels.small_gemm.small_linear`."""
        small_linear(
            out, x, weight, self.workspace,
            bias=bias, norm_weight=norm_weight, eps=eps, norm_scratch=norm_scratch, glu=glu,
            residual=residual,
        )  # fmt: skip

    def plain(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pdl: bool = False,
    ) -> None:
        """out [M, N] = x [M, K] W^T + bias, for any M; out is float32 or the dtype of x.

        pdl: launch while the kernel before still runs, where the product is ours.
        """
        if self.deterministic:
            fixed_linear(out, x, weight, bias=bias, workspace=self.workspace, pdl=pdl)
        elif out.dtype != x.dtype:
            torch.ops.aten.mm.dtype_out(x, weight.t(), out.dtype, out=out)
        elif bias is not None:
            torch.addmm(bias, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)
