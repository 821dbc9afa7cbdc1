"""Products whose K is cut into parts, each summed by a program of its own.

The program of the last part takes in the others' sums as they come. It sees from the numbers
themselves whether they are there: a place in the workspace holds EMPTY until its number comes, and
again once it is taken. That is one way through the L2 cache, where a count of arrivals, with all
stores before it, is three. No program waits for one that cannot run: blocks start in the order of
their numbers, and those of the last part have the highest (launch grids as [tiles, parts]). A tile
has a number for each thread at least: where several threads hold one, only one of them may have
looked after it came.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORKSPACE_NUMBERS = 1 << 22
EMPTY = -1
"""As int32. As float32 this is a NaN that no operation makes; `leave_part` writes none."""

AT_ONCE = tl.constexpr(3)
"""Parts that are looked for at once, so that their ways overlap."""

_EMPTY = tl.constexpr(EMPTY)
_NAN = tl.constexpr(0x7FC00000)


@dataclass(frozen=True, slots=True)
class GemmWorkspace:
    """Partial tiles, shared by all layers. partials int32: the bits of float32 numbers, EMPTY
    between calls."""

    partials: torch.Tensor

    def holds(self, num_tiles: int, parts: int, tile_numbers: int) -> bool:
        """Whether there is room for the parts of so many tiles, but the last of each."""
        return num_tiles * (parts - 1) * tile_numbers <= len(self.partials)


def new_gemm_workspace(device: torch.device) -> GemmWorkspace:
    """Allocate the workspace: 16 MiB of partial tiles."""
    return GemmWorkspace(torch.full((WORKSPACE_NUMBERS,), EMPTY, dtype=torch.int32, device=device))


@triton.jit
def add_parts(
    acc,
    partial_ptr,
    tile,
    part,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Leave this program's part of a tile's sum, float32 [BLOCK_M, BLOCK_N], for the program of the
    last part, which gets the sum of all, added up in order.

    Returns the sum and whether this is the last program (else the first is this part still).
    """
    OTHERS: tl.constexpr = PARTS - 1
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at += partial_ptr + tile.to(tl.int64) * (OTHERS * SIZE)
    is_last = part == OTHERS
    if is_last:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in tl.static_range(0, OTHERS, AT_ONCE):
            total = _add_arrived(total, at + first * SIZE, SIZE, min(OTHERS - first, AT_ONCE))
        acc = total + acc
    else:
        bits = tl.where(acc == acc, acc.to(tl.int32, bitcast=True), _NAN)
        tl.store(at + part * SIZE, bits)
    return acc, is_last


@triton.jit
def _add_arrived(total, at, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """total and COUNT tiles, one to three, SIZE numbers apart, in order, once all of them are
    there; leaves their places empty.

    A loop for each count: Triton 3.6 fails to compile one that carries a value twice.
    """
    empty = tl.full(total.shape, _EMPTY, tl.int32)
    a = tl.load(at, volatile=True)
    if COUNT == 1:
        while tl.max((a == _EMPTY).to(tl.int32)) == 1:
            a = tl.load(at, volatile=True)
        tl.store(at, empty)
        return total + a.to(tl.float32, bitcast=True)
    b = tl.load(at + SIZE, volatile=True)
    if COUNT == 2:
        while tl.max(((a == _EMPTY) | (b == _EMPTY)).to(tl.int32)) == 1:
            a = tl.load(at, volatile=True)
            b = tl.load(at + SIZE, volatile=True)
        tl.store(at, empty)
        tl.store(at + SIZE, empty)
        return total + a.to(tl.float32, bitcast=True) + b.to(tl.float32, bitcast=True)
    c = tl.load(at + 2 * SIZE, volatile=True)
    while tl.max(((a == _EMPTY) | (b == _EMPTY) | (c == _EMPTY)).to(tl.int32)) == 1:
        a = tl.load(at, volatile=True)
        b = tl.load(at + SIZE, volatile=True)
        c = tl.load(at + 2 * SIZE, volatile=True)
    tl.store(at, empty)
    tl.store(at + SIZE, empty)
    tl.store(at + 2 * SIZE, empty)
    total += a.to(tl.float32, bitcast=True)
    total += b.to(tl.float32, bitcast=True)
    return total + c.to(tl.float32, bitcast=True)
