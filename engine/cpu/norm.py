"""Root-mean-square norms in few operator calls.

For one token an operator call costs more than its arithmetic, and torch's own `rms_norm` is built
of six. The residual stream carries one column more, sqrt(eps * H): the length of a whole line is
then sqrt(sum of squares + eps * H), which is the norm's divisor up to the factor sqrt(H).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm

from engine.cpu.tables import FloatArray

_PAD = 16  # keeps lines on 64-byte boundaries


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream. lines float32 [T, H + 16]: values, then sqrt(eps * H), then zeros.

    values and array are views [T, H] of it.
    """

    lines: torch.Tensor
    values: torch.Tensor
    array: FloatArray

    @classmethod
    def of(cls, embeddings: torch.Tensor, eps: float) -> Residual:
        """float32 [T, H] -> the stream before the first layer."""
        num_tokens, size = embeddings.shape
        lines = torch.zeros(num_tokens, size + _PAD)
        lines[:, size] = math.sqrt(eps * size)
        values = lines[:, :size]
        values.copy_(embeddings)
        return cls(lines, values, values.numpy())

    def take(self, tokens: torch.Tensor) -> Residual:
        """Some of the tokens, int64 [S]."""
        lines = self.lines[tokens]
        values = lines[:, : self.values.shape[1]]
        return Residual(lines, values, values.numpy())

    def lengths(self) -> torch.Tensor:
        """float32 [T, 1]: what a norm divides by, times sqrt(H)."""
        lengths: torch.Tensor = torch.linalg.vector_norm(self.lines, dim=1, keepdim=True)
        return lengths


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, given out in `dtype`."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._scaled_weight = weight.float() * math.sqrt(len(weight))
        self._dtype = dtype

    def __call__(self, residual: Residual) -> torch.Tensor:
        """float32 [T, H] -> `dtype` [T, H]."""
        out = torch.empty(residual.values.shape, dtype=self._dtype)
        return torch.mul(residual.values, self._scaled_weight / residual.lengths(), out=out)


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Norm each head in place: float32 [T, heads, head_dim], weight [heads, head_dim]."""
    heads.copy_(rms_norm(heads, heads.shape[-1:], eps=eps).mul_(weight))
