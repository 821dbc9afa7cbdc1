"""The decode rows' contexts, kept in one piece from step to step.

Attention of decode rows reads keys and values as one matrix a head, and gathering them from blocks
costs more than the attention itself. As long as the same rows decode on, only one token a row is
new: it is written here beside the paged cache, which stays the only place that others read.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.cpu.kv_cache import KvCache
from engine.cpu.step_inputs import PIECE_TOKENS, DecodeGroup
from engine.cpu.tables import FloatArray, LongArray
from engine.plan import IntArray, StepPlan


class DecodeContexts:
    """Keys and values of the rows that decoded last, if they fit into `max_bytes`."""

    def __init__(self, cache: KvCache, max_bytes: int) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._rows: IntArray = np.zeros(0, np.int32)
        self._positions: IntArray = np.zeros(0, np.int32)
        self._num_rows = 0
        # [layers, 2, B * kv heads, length, head_dim]; lengths are padded.
        self._shape: tuple[int, ...] = (0, 0, 0, 0, 0)
        self._layers: torch.Tensor | None = None
        # The same by layer: vectors [.., head_dim], and as `layer` gives them out.
        self._vectors: list[FloatArray] = []
        self._pairs: list[tuple[FloatArray, FloatArray]] = []
        self._blocks = torch.zeros(0, dtype=torch.int64)  # where to gather from
        self._index: LongArray | None = None  # where the step's tokens go; None: gather

    def enter(self, plan: StepPlan, group: DecodeGroup | None) -> None:
        """Take up a step, before its layers run."""
        touched = {new.row for new in plan.new_rows} | set(plan.rows[plan.num_decode :].tolist())
        if not touched.isdisjoint(self._rows.tolist()):
            self._rows = self._rows[:0]
        if group is None:
            return
        rows, positions = plan.rows[: plan.num_decode], plan.num_computed[: plan.num_decode]
        goes_on = (
            self._layers is not None
            and group.context == self._shape[3]
            and np.array_equal(rows, self._rows)
            and np.array_equal(positions, self._positions + 1)
        )
        if goes_on:
            self._index = self._cache.context_index(positions, group.context)
        else:
            self._start(group)
        self._rows, self._positions = rows.copy(), positions.copy()

    def layer(self, index: int, kv: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Keys and values of one layer, the step's tokens included.

        kv float32 [B, 2 * kv heads, head_dim]: k | v of those tokens, in the paged cache already.
        Returns two of float32 [B, kv heads, pieces, PIECE_TOKENS, head_dim].
        """
        if self._layers is None:
            return self._by_piece(self._cache.gather(index, self._blocks, self._shape[2]))
        if self._index is None:
            self._cache.gather(index, self._blocks, self._shape[2], self._layers[index])
        else:
            self._vectors[index][self._index] = kv
        return self._pairs[index]

    def _start(self, group: DecodeGroup) -> None:
        """Make room for another set of rows or longer contexts, or go without."""
        self._index = None
        self._blocks = self._cache.piece_index(group.block_table)
        self._num_rows = group.num_rows
        self._shape = self._cache.context_shape(group.num_rows, group.context)
        if self._layers is not None and self._layers.shape == self._shape:
            return
        self._layers, self._vectors, self._pairs = None, [], []
        if 4 * torch.Size(self._shape).numel() <= self._max_bytes:
            self._layers = torch.empty(self._shape)
            self._vectors = [layer.numpy().reshape(-1, self._shape[-1]) for layer in self._layers]
            self._pairs = [self._by_piece(layer) for layer in self._layers]

    def _by_piece(self, context: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """One layer's keys and values, as `layer` gives them out."""
        length, head_dim = self._shape[-2:]
        shape = (2, self._num_rows, -1, length // PIECE_TOKENS, PIECE_TOKENS, head_dim)
        k, v = context.numpy().reshape(shape)
        return k, v
