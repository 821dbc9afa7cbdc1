"""Tiles of a paged KV cache: by pointers, or one head's keys by one instruction (a tensor
descriptor)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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


def tile_bytes(cache: torch.Tensor, tile_tokens: int) -> int:
    """Bytes of one head's keys and values of a tile, as they lie in shared memory."""
    return 2 * tile_tokens * triton.next_power_of_2(cache.shape[3]) * cache.element_size()


@triton.jit
def load_tile(
    k_ptr,
    v_ptr,
    table_at,
    block_id,
    tile,
    last_position,
    kv_offset,
    stride_block,
    stride_token,
    dims,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    TMA: tl.constexpr,
):
    """Keys and values of one tile, whatever lies beyond last_position included; block_id: of a tile
    that lies in one block. TMA: k_ptr and v_ptr are descriptors."""
    if TMA:
        slot = block_id * BLOCK_SIZE + tile * BLOCK_N % BLOCK_SIZE
        k = k_ptr.load([slot, kv_offset])
        v = v_ptr.load([slot, kv_offset])
    else:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE % BLOCK_N == 0:
            at = block_id.to(tl.int64) * stride_block + kv_offset
        else:  # block 0 for keys that the row has no block for
            here = keys <= last_position
            ids = tl.load(table_at + keys // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
            at = ids * stride_block + kv_offset
        at += (keys % BLOCK_SIZE) * stride_token
        mask = (dims < D)[None, :]
        k = tl.load(k_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
    return k, v


@triton.jit
def block_of(table_at, tile, end_tile, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block id of a tile that lies in one block; 0 where tiles span several."""
    block_id = 0
    if BLOCK_SIZE % BLOCK_N == 0:
        at = table_at + tile * BLOCK_N // BLOCK_SIZE
        block_id = tl.load(at, mask=tile < end_tile, other=0)
    return block_id


def gather_kv(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first seq_len tokens of one row out of a paged cache: [seq_len, HKV, D]."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    return cache[blocks].flatten(0, 1)[:seq_len]
