"""Products whose K is cut into parts, each summed by a program of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_parts(
    acc,
    partial_ptr,
    arrivals_ptr,
    tile,
    part,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Leave this program's part of a tile's sum, float32 [BLOCK_M, BLOCK_N], among the partials;
    the program that is the last of the tile to do so gets the sum of all, added up in order.

    Returns the sum and whether this is the last program (else the first is this part still). The
    tile's count of arrivals is zero before and after.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    base = partial_ptr + tile.to(tl.int64) * (PARTS * SIZE)
    tl.store(base + part * SIZE + at, acc)
    tl.debug_barrier()  # all stores of this program before its arrival
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") + 1
    is_last = arrived == PARTS
    if is_last:
        tl.store(arrivals_ptr + tile, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in tl.static_range(PARTS):
            acc += tl.load(base + other * SIZE + at, cache_modifier=".cg")
    return acc, is_last
