"""KV memory of the CPU runner. Knows layout and addresses; who owns a block is the block manager's.

One tensor [layers, blocks + 1, 2, kv heads, block size, head_dim] (2 = k, v). A head's tokens of
one block are contiguous, so one `index_select` of whole pieces gives matrices ready for a batched
product. The last block is never handed out: it stays zero and pads short block tables.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.cpu.tables import FloatArray, LongArray
from engine.model.spec import ModelSpec
from engine.plan import IntArray


class KvCache:
    """Float32 keys and values of all layers, addressed by block id and position in the block."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int) -> None:
        heads, head_dim = spec.num_kv_heads, spec.head_dim
        shape = (spec.num_layers, num_blocks + 1, 2, heads, block_size, head_dim)
        self._data = torch.zeros(shape, dtype=torch.float32)
        self.pad_block = num_blocks
        self.block_size = block_size
        self.num_bytes = self._data.numel() * self._data.element_size()
        pieces = (num_blocks + 1) * 2 * heads
        self._pieces = [layer.view(pieces, block_size * head_dim) for layer in self._data]
        self._vectors = [layer.numpy().reshape(-1, head_dim) for layer in self._data]
        self._head_dim = head_dim
        self._piece_of_side = torch.arange(2 * heads).view(2, 1, heads, 1)
        self._piece_of_vector = np.arange(2 * heads)[None, :]

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero whole blocks, int64 [B], before a new owner fills them.

        Positions behind a row's end are masked by adding minus infinity, which does not hide a
        stale NaN.
        """
        self._data.index_fill_(1, blocks, 0.0)

    def vector_index(self, blocks: LongArray, offsets: LongArray) -> LongArray:
        """Addresses of tokens for `write`: block int64 [T], offset int64 [T] -> [T, 2 * heads]."""
        heads2 = self._piece_of_vector.shape[1]
        pieces = blocks[:, None] * heads2 + self._piece_of_vector
        index: LongArray = pieces * self.block_size + offsets[:, None]
        return index

    def piece_index(self, block_table: torch.Tensor) -> torch.Tensor:
        """Addresses of contexts for `gather`: block ids int64 [B, C] -> [2 * B * heads * C]."""
        heads2 = self._piece_of_vector.shape[1]
        index: torch.Tensor = block_table[None, :, None, :] * heads2 + self._piece_of_side
        return index.reshape(-1)

    def write(self, layer: int, index: LongArray, kv: FloatArray) -> None:
        """Store k | v of T tokens, float32 [T, 2 * heads, head_dim]."""
        self._vectors[layer][index] = kv

    def gather(
        self, layer: int, index: torch.Tensor, batch_heads: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Contexts, float32 [2, batch * heads, columns * block size, head_dim]; 0 is k, 1 is v."""
        source = self._pieces[layer]
        if out is not None:
            torch.index_select(source, 0, index, out=out.view(len(index), -1))
            return out
        pieces: torch.Tensor = source.index_select(0, index)
        return pieces.view(2, batch_heads, -1, self._head_dim)

    def context_shape(self, num_rows: int, length: int) -> tuple[int, ...]:
        """Shape of the gathered contexts of all layers, `length` tokens each."""
        heads = self._piece_of_vector.shape[1] // 2
        return (len(self._data), 2, num_rows * heads, length, self._head_dim)

    def context_index(self, positions: IntArray, length: int) -> LongArray:
        """Addresses in gathered contexts of one token a row, int32 [B] -> int64 [B, 2 * heads].

        They count vectors of one layer.
        """
        heads2 = self._piece_of_vector.shape[1]
        heads = heads2 // 2
        side, head = np.divmod(np.arange(heads2), heads)
        rows = np.arange(len(positions))[:, None]
        line = (side * len(positions) + rows) * heads + head
        index: LongArray = line * length + positions[:, None]
        return index
