"""The decode rows' contexts, kept in one piece from step to step.

Attention of decode rows reads keys and values as one matrix a head, and gathering them from blocks
costs more than the attention itself. As long as the same rows decode on, only one token a row is
new: it is written here beside the paged cache, which stays the only place that others read.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.cpu.kv_cache import KvCache
from engine.cpu.step_inputs import DecodeGroup
from engine.plan import IntArray, StepPlan


class DecodeContexts:
    """Keys and values of the rows that decoded last, if they fit into `max_bytes`."""

    def __init__(self, cache: KvCache, max_bytes: int) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._rows: IntArray = np.zeros(0, np.int32)
        self._positions: IntArray = np.zeros(0, np.int32)
        self._length = 0  # of a context, padded
        self._layers: torch.Tensor | None = None  # [layers, 2, B * kv heads, length, head_dim]
        self._vectors: list[torch.Tensor] = []  # the same by layer, [.., head_dim]
        self._pieces = torch.zeros(0, dtype=torch.int64)  # where to gather from
        self._index: torch.Tensor | None = None  # where the step's tokens go; None: gather

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
            and group.context == self._length
            and np.array_equal(rows, self._rows)
            and np.array_equal(positions, self._positions + 1)
        )
        if goes_on:
            self._index = self._cache.context_index(positions, group.context)
        else:
            self._start(group)
        self._rows, self._positions = rows.copy(), positions.copy()

    def layer(
        self, index: int, group: DecodeGroup, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, the step's tokens included.

        kv float32 [B, 2 * kv heads, head_dim]: k | v of those tokens, in the paged cache already.
        Returns two of float32 [B * kv heads, length, head_dim].
        """
        batch_heads = group.num_rows * kv.shape[1] // 2
        if self._layers is None:
            k, v = self._cache.gather(index, self._pieces, batch_heads)
        elif self._index is None:
            k, v = self._cache.gather(index, self._pieces, batch_heads, self._layers[index])
        else:
            self._vectors[index].index_put_((self._index,), kv)
            k, v = self._layers[index]
        return k, v

    def _start(self, group: DecodeGroup) -> None:
        """Make room for another set of rows or longer contexts, or go without."""
        self._index = None
        self._pieces = self._cache.piece_index(group.block_table)
        self._length = group.context
        shape = self._cache.context_shape(group.num_rows, group.context)
        if self._layers is not None and self._layers.shape == shape:
            return
        self._layers = None
        if 4 * torch.Size(shape).numel() <= self._max_bytes:
            self._layers = torch.empty(shape)
            self._vectors = [layer.view(-1, shape[-1]) for layer in self._layers]
