"""Tiles of a paged KV cache by tensor descriptors: one head's keys by one instruction."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


def takes_tiles(cache: torch.Tensor, tile_tokens: int) -> bool:
    """Whether a block of the cache [num_blocks, block_size, HKV, D] holds whole tiles, of a type
    and a head size that the hardware takes."""
    block_size, head_dim = cache.shape[1], cache.shape[3]
    is_even = block_size % tile_tokens == 0 and head_dim == triton.next_power_of_2(head_dim)
    return is_even and cache.element_size() == 2


def cache_tiles(cache: torch.Tensor, tile_tokens: int) -> TensorDescriptor:
    """A descriptor over [slots, HKV * D], with tiles [tile_tokens, D]."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    slots = cache.view(num_blocks * block_size, num_kv_heads * head_dim)
    return TensorDescriptor.from_tensor(slots, [tile_tokens, head_dim])
