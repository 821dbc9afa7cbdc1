"""Buffers that one step's layers write into: allocated once, viewed by length, never freed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.gpu.memory import StepLimits
from engine.model.spec import ModelSpec
from kernels.deferred_norm import new_squares
from kernels.norm import MAX_NORM_PARTS, MAX_PARTS_ROWS, norm_parts
from kernels.small_gemm import MAX_SMALL_M


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of up to T packed tokens. H hidden, I intermediate, Q = heads x head_dim.

    hidden [T, H]: the residual stream. normed [T, H]; qkv [T, Q + 2K]; attended [T, Q];
    gate_up [T, 2I]; gated [T, I]. token_rows, positions, slots int32 [T]. All in the model's dtype
    but for the last three. gate_up is written where cuBLAS runs the product before an activation;
    it has no columns where it never does.
    squares float32 [min(T, MAX_SMALL_M), tiles]: sums of hidden^2, where
    products share the norm between them; normed then has hidden times the norm's weight.
    parts float32 [min(T, MAX_PARTS_ROWS), MAX_NORM_PARTS * H], or no columns where no product is
    cut into parts: room for `parts_of`.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    squares: torch.Tensor
    parts: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def first(self, num_tokens: int) -> Activations:
        """Views of the first num_tokens rows."""
        return Activations(*(getattr(self, name)[:num_tokens] for name in self.__slots__))

    def parts_of(self, count: int) -> torch.Tensor:
        """float32 [count, T, H]: room for a product in so many parts of its K, for up to
        MAX_PARTS_ROWS rows."""
        rows, columns = self.hidden.shape
        return self.parts.view(-1)[: count * rows * columns].view(count, rows, columns)


def new_activations(
    spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device, same_bits: bool
) -> Activations:
    """Allocate buffers for num_tokens packed tokens; same_bits: no product is cuBLAS's."""

    depths = (spec.q_size, spec.intermediate_size)
    has_parts = not same_bits and any(
        norm_parts(MAX_PARTS_ROWS, spec.hidden_size, k) > 1 for k in depths
    )
    part_columns = MAX_NORM_PARTS * spec.hidden_size if has_parts else 0

    def matrix(columns: int) -> torch.Tensor:
        return torch.zeros(num_tokens, columns, dtype=dtype, device=device)

    def indices() -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int32, device=device)

    return Activations(
        hidden=matrix(spec.hidden_size),
        normed=matrix(spec.hidden_size),
        qkv=matrix(spec.qkv_size),
        attended=matrix(spec.q_size),
        gate_up=matrix(0 if same_bits else 2 * spec.intermediate_size),
        gated=matrix(spec.intermediate_size),
        squares=new_squares(min(num_tokens, MAX_SMALL_M), spec.hidden_size, device),
        parts=torch.zeros(min(num_tokens, MAX_PARTS_ROWS), part_columns, device=device),
        token_rows=indices(),
        positions=indices(),
        slots=indices(),
    )


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """The end of a step for up to S sampled rows.

    hidden, normed [S, H] in the model's dtype; logits float32 [S, V].
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor


def new_head_buffers(
    spec: ModelSpec, limits: StepLimits, dtype: torch.dtype, device: torch.device
) -> HeadBuffers:
    """Allocate buffers for max_num_seqs sampled rows."""

    def matrix() -> torch.Tensor:
        return torch.zeros(limits.max_num_seqs, spec.hidden_size, dtype=dtype, device=device)

    logits = torch.zeros(limits.max_num_seqs, spec.vocab_size, device=device)
    return HeadBuffers(matrix(), matrix(), logits)
