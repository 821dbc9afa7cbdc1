"""KV cache memory on the device. Which block belongs to whom is the block manager's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvMemory:
    """k, v: [layers, num_blocks + 1, block_size, kv heads, head_dim]; the last block is a dummy."""

    k: torch.Tensor
    v: torch.Tensor

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v cache of one layer: [num_blocks + 1, block_size, kv heads, head_dim]."""
        return self.k[index], self.v[index]


def new_kv_memory(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KvMemory:
    """Allocate the cache. Values are cleared: attention multiplies those of slots that nobody wrote
    by zero. Keys are not: scores of such slots are left out."""
    shape = (spec.num_layers, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
    return KvMemory(
        torch.empty(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
    )
