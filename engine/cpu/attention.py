"""Attention of decode rows: one query token a row, over contexts in pieces of `PIECE_TOKENS`.

Every product is of one shape, a kv head's queries by one piece, however long the context is and
however many rows there are: so a row's result is the same, to the last bit, in any company. Pieces
behind a row's end add exact zeros. NumPy's products of such small matrices take a third of the
time of `torch.bmm`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.cpu.step_inputs import PIECE_TOKENS, DecodeGroup
from engine.cpu.tables import FloatArray
from engine.model.spec import ModelSpec


class DecodeAttention:
    """The attention of one step's B decode rows, over contexts padded to L tokens.

    Keeps the arrays of scores and results from layer to layer: each call overwrites the last one's
    result.
    """

    def __init__(self, spec: ModelSpec, group: DecodeGroup) -> None:
        num_rows, context = group.num_rows, group.context
        kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
        queries, pieces = spec.num_heads // kv_heads, context // PIECE_TOKENS
        self.num_rows = num_rows
        self._masks = group.masks
        self._num_heads, self._scale = spec.num_heads, 1 / math.sqrt(head_dim)
        self._query_shape = (num_rows, kv_heads, 1, queries, head_dim)
        scores = np.empty((num_rows, kv_heads, queries, pieces, PIECE_TOKENS), np.float32)
        self._scores = torch.from_numpy(scores).view(num_rows * kv_heads, queries, context)
        self._scores_by_piece = scores.transpose(0, 1, 3, 2, 4)
        self._parts = np.empty((num_rows, kv_heads, pieces, queries, head_dim), np.float32)
        self._mixed = np.empty((num_rows, kv_heads, queries, head_dim), np.float32)
        self._result = torch.from_numpy(self._mixed).view(num_rows, spec.q_size)

    def __call__(
        self, heads: FloatArray, keys: FloatArray, values: FloatArray, window: int
    ) -> torch.Tensor:
        """Heads q | k | v, float32 [B, q + 2 * kv heads, head_dim] -> [B, q_size].

        keys and values float32 [B, kv heads, pieces, PIECE_TOKENS, head_dim], the step's own
        included; window: the layer's.
        """
        queries = heads[:, : self._num_heads].reshape(self._query_shape)
        np.matmul(queries, keys.swapaxes(-1, -2), out=self._scores_by_piece)
        torch.add(self._masks[window], self._scores, alpha=self._scale, out=self._scores)
        torch.softmax(self._scores, -1, out=self._scores)
        np.matmul(self._scores_by_piece, values, out=self._parts)
        np.add.reduce(self._parts, axis=2, out=self._mixed)
        return self._result
