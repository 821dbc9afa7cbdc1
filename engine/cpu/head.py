"""Embedding lookup and LM head of the CPU runner."""

from __future__ import annotations

import numpy as np
import torch

from engine.cpu.linear import LinearFactory
from engine.model.quantized import QuantizedMatrix
from engine.model.weights import Matrix, matrix_bytes

_REFINE_MARGIN = 1 / 64
"""Relative distance to the best logit within which packed logits are computed again.

bfloat16 rounding moves a logit by at most 1/256 of its size, twice (activations, result); the rest
of the margin covers the requantized weights.
"""


class Embedding:
    """Token id -> float32 vector, from a dense or quantized table."""

    def __init__(self, table: Matrix) -> None:
        self._table = table
        self.num_bytes = matrix_bytes(table)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> float32 [T, H], a new tensor."""
        if isinstance(self._table, torch.Tensor):
            return self._table.index_select(0, token_ids)
        return self._table.take(token_ids.numpy()).dequantize()


class LmHead:
    """Hidden states -> logits.

    A packed or 8-bit head gives logits too coarse to tell the best tokens apart. So those near the
    best one are computed again in float32 from the checkpoint's own numbers.
    """

    def __init__(self, matrix: Matrix, make_linear: LinearFactory) -> None:
        self._linear = make_linear(matrix)
        self._exact = matrix if isinstance(matrix, QuantizedMatrix) else None
        self.num_bytes = self._linear.num_bytes if self._exact is not None else 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, H] -> float32 [S, V]."""
        logits = self._linear(hidden.to(self._linear.input_dtype)).float()
        if self._exact is not None and not self._linear.is_exact:
            self._refine(logits, hidden, self._exact)
        return logits

    def _refine(self, logits: torch.Tensor, hidden: torch.Tensor, exact: QuantizedMatrix) -> None:
        # In NumPy: torch takes some ten times as long to compare and to find.
        values = logits.numpy()
        best = values.max(axis=1, keepdims=True)
        near = np.flatnonzero(values >= best - np.abs(best) * np.float32(_REFINE_MARGIN))
        rows, tokens = np.divmod(near, values.shape[1])
        vectors = exact.take(tokens).dequantize()
        values[rows, tokens] = (hidden[torch.from_numpy(rows)] * vectors).sum(dim=1).numpy()
