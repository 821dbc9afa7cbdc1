"""What `bench kernels` measures of products: those of a layer, chains of layers, fixed tiles; each
beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from kernels.activation import silu_mul
from kernels.deferred_norm import NextNorm, ScaledInput, new_squares
from kernels.fixed_gemm import fixed_linear
from kernels.small_gemm import small_linear
from kernels.split_k import new_gemm_workspace
from ops.bench.kernel_inputs import DEVICE, DTYPE, QWEN3_8B, ModelShape, random
from ops.bench.kernel_timing import Row, make_row, num_sets, time_calls


def linear_rows(shape: ModelShape, m: int) -> Iterator[Row]:
    """small_linear of each layer beside cuBLAS, weights rotated; gate_up with its activation
    fused."""
    workspace = new_gemm_workspace(DEVICE)
    for name, n, k in [*shape.linear_layers, ("head", shape.vocab_size, shape.hidden)]:
        glu = name == "gate_up"
        weights = [random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
        x, out = random(m, k), torch.empty(m, n // (2 if glu else 1), dtype=DTYPE, device=DEVICE)
        calls = [partial(small_linear, out, x, w, workspace, glu=glu) for w in weights]
        base = time_calls([partial(linear, x, w) for w in weights], replays=7)
        moved = 2.0 * (n * k + m * (n + k))
        yield make_row(
            f"linear.{shape.name}.{name}.m{m}",
            time_calls(calls),
            moved,
            2.0 * m * n * k,
            "cublas",
            base.p50_us,
        )


class Chain:
    """The linear layers of several blocks in a row for m tokens, on random weights."""

    def __init__(self, shape: ModelShape, m: int, num_layers: int) -> None:
        self.blocks = [
            [random(n, k, scale=k**-0.5) for _, n, k in shape.linear_layers]
            for _ in range(num_layers)
        ]
        self.stream = random(m, shape.hidden)
        self.attn = random(m, shape.num_q_heads * shape.head_dim)
        self.inner = random(m, shape.intermediate)
        self._workspace = new_gemm_workspace(DEVICE)
        self._qkv = torch.empty(m, shape.linear_layers[0][1], dtype=DTYPE, device=DEVICE)
        self._gated = torch.empty_like(self.inner)
        scratch, weight = torch.empty_like(self.stream), random(shape.hidden)
        self._norm = {"norm_weight": weight, "eps": 1e-6, "norm_scratch": scratch}
        self._next_norm = None  # one row has the norm in the beginning of the product behind it
        if m > 1:
            self._next_norm = NextNorm(weight, scratch, new_squares(m, shape.hidden, DEVICE), 1e-6)

    def ours(self) -> None:
        """With norm, SiLU and residual."""
        x = None
        for w_qkv, w_o, w_up, w_down in self.blocks:
            self._of_norm(self._qkv, x, w_qkv)
            x = self._before_norm(self.attn, w_o)
            self._of_norm(self._gated, x, w_up, glu=True)
            x = self._before_norm(self._gated, w_down)

    def cublas(self) -> None:
        """The products alone."""
        for w_qkv, w_o, w_up, w_down in self.blocks:
            linear(self.stream, w_qkv)
            linear(self.attn, w_o)
            linear(self.stream, w_up)
            linear(self.inner, w_down)

    def _of_norm(
        self, out: torch.Tensor, x: ScaledInput | None, weight: torch.Tensor, glu: bool = False
    ) -> None:
        if x is not None:
            small_linear(out, x, weight, self._workspace, glu=glu)
        else:
            small_linear(out, self.stream, weight, self._workspace, glu=glu, **self._norm)  # type: ignore[arg-type]

    def _before_norm(self, x: torch.Tensor, weight: torch.Tensor) -> ScaledInput | None:
        return small_linear(
            self.stream, x, weight, self._workspace, residual=self.stream,
            next_norm=self._next_norm,
        )  # fmt: skip


def chain_row(shape: ModelShape, m: int, num_layers: int) -> Row:
    """The linear layers of several blocks in a row, norm, SiLU and residual fused, beside cuBLAS's
    GEMMs alone."""
    chain = Chain(shape, m, num_layers)
    timing = time_calls([chain.ours], min_calls=2)
    base = time_calls([chain.cublas], replays=7, min_calls=2)
    size = sum(w.numel() for block in chain.blocks for w in block)
    return make_row(
        f"chain.{shape.name}.m{m}.{num_layers}-layers",
        timing,
        2.0 * size,
        2.0 * m * size,
        "cublas",
        base.p50_us,
    )


def fixed_rows(m: int) -> Iterator[Row]:
    """The batch-invariant GEMM on the 8B's layers beside cuBLAS: o and down with the residual in
    their ends; gate_up with its activation, which has a launch of its own beside."""
    workspace = new_gemm_workspace(DEVICE)
    for name, n, k in QWEN3_8B.linear_layers:
        glu = name == "gate_up"
        num_outputs = n // 2 if glu else n
        weights = [random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
        x, out = random(m, k), random(m, num_outputs)
        residual = out if name in ("o", "down") else None
        ours = partial(
            fixed_linear, out, x, residual=residual, workspace=workspace, pdl=True, glu=glu
        )
        timing = time_calls([partial(ours, weight=w) for w in weights])
        base = time_calls([partial(_cublas, out, x, w, glu) for w in weights], replays=7)
        moved = 2.0 * (n * k + m * (num_outputs + k))
        beside = "cublas+silu" if glu else "cublas"
        yield make_row(f"fixed.8b.{name}.m{m}", timing, moved, 2.0 * m * n * k, beside, base.p50_us)


def _cublas(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, glu: bool) -> None:
    product = linear(x, weight)
    if glu:
        silu_mul(out, product, pdl=True)
