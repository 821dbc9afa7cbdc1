"""Which product runs where: ours for few rows, cuBLAS for many, fixed tiles if deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fixed_gemm import fixed_linear
from kernels.small_gemm import GemmWorkspace, small_linear

MAX_FUSED_ROWS = 64
"""Up to here one launch of ours does norm, product and residual, and beats cuBLAS's three."""

WIDE_HIDDEN = 4096
WIDE_FUSED_ROWS = 16
"""Of a wide model each product takes much longer than a launch: from here on fixed tiles, each
product started while the kernel before still runs, are 3 % faster than fused ones (Qwen3-8B's shape
at 64 rows on an H200)."""


def max_fused_rows(hidden_size: int) -> int:
    """Most rows for which products are fused with their neighbours."""
    return WIDE_FUSED_ROWS if hidden_size >= WIDE_HIDDEN else MAX_FUSED_ROWS


@dataclass(frozen=True, slots=True)
class Linears:
    """x W^T in the flavour this engine was configured for. fused_rows: see max_fused_rows."""

    deterministic: bool
    workspace: GemmWorkspace
    fused_rows: int = MAX_FUSED_ROWS

    def is_fused(self, num_rows: int) -> bool:
        """Whether `fused` takes this many rows."""
        return not self.deterministic and num_rows <= self.fused_rows

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
        if self.deterministic or self.fused_rows < len(x) <= MAX_FUSED_ROWS:
            fixed_linear(out, x, weight, bias=bias, workspace=self.workspace, pdl=pdl)
        elif out.dtype != x.dtype:
            torch.ops.aten.mm.dtype_out(x, weight.t(), out.dtype, out=out)
        elif bias is not None:
            torch.addmm(bias, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)
