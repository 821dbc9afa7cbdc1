"""Tiles of the batch-invariant GEMM that its sweep tries: none spills a register on an H200, with a
residual or an activation in its end (bench/offline.py)."""

from __future__ import annotations

from kernels.fixed_tiles import FEW_ROWS, FixedGemmTile

MANY_ROWS = 2048
LARGE_TILE = 128 * 128
"""From MANY_ROWS on there are enough tiles of this many sums to fill the GPU: no smaller ones."""


def candidates(m: int, splits: int, glu: bool) -> list[FixedGemmTile]:
    """Tiles for m rows."""
    if m <= 16:
        return sixteen_row_tiles(splits > 1)
    if glu:
        return few_glu_tiles() if m <= FEW_ROWS else many_glu_tiles(m)
    return few_tiles(splits > 1) if m <= FEW_ROWS else many_tiles(m, splits)


def sixteen_row_tiles(parallel: bool) -> list[FixedGemmTile]:
    """Of up to 16 rows, with and without an activation: the smaller matrix instruction gives the
    same bits."""
    sizes = [
        (16, 256, 2, 4), (16, 128, 2, 6), (16, 256, 4, 4), (32, 128, 4, 4), (32, 128, 4, 6),
        (32, 256, 4, 3), (64, 128, 4, 4), (128, 64, 4, 5),
    ]  # fmt: skip
    return [FixedGemmTile(16, n, k, warps, stages, parallel) for n, k, warps, stages in sizes]


def few_tiles(parallel: bool) -> list[FixedGemmTile]:
    """Of up to FEW_ROWS rows."""
    sizes = [(32, 64, 6), (64, 64, 6), (64, 128, 4), (128, 64, 5), (128, 128, 3)]
    return [
        FixedGemmTile(64, n, k, 4, stages, parallel, tma)
        for tma in (True, False)
        for n, k, stages in sizes
    ]


def few_glu_tiles() -> list[FixedGemmTile]:
    """The same where a tile has two sums, and so twice the columns that it says."""
    sizes = [(16, 64, 6), (16, 128, 4), (32, 64, 6), (32, 128, 4), (64, 64, 5), (64, 128, 4)]
    return [
        FixedGemmTile(64, n, k, 4, stages, False, tma)
        for tma in (True, False)
        for n, k, stages in sizes
    ]


def many_tiles(m: int, splits: int) -> list[FixedGemmTile]:
    """Of more rows; small tiles are left out where there are enough large ones."""
    sizes = [(128, 64, 4, 5), (128, 128, 8, 4), (64, 128, 4, 5)]
    if splits == 1:  # of these a second sum does not fit into registers
        sizes += [(128, 256, 8, 3), (128, 128, 4, 4), (64, 256, 4, 4)]
    found = [
        FixedGemmTile(bm, bn, 64, warps, stages, False, tma)
        for tma in (True, False)
        for bm, bn, warps, stages in sizes
    ]
    if splits == 1:
        for bm, bn, warps, stages in ((128, 256, 8, 3), (128, 128, 8, 4), (64, 256, 4, 4)):
            found.append(FixedGemmTile(bm, bn, 64, warps, stages, False, True, True))
    return [t for t in found if m < MANY_ROWS or t.block_m * t.block_n >= LARGE_TILE]


def many_glu_tiles(m: int) -> list[FixedGemmTile]:
    """The same with two sums."""
    sizes = [
        (128, 128, 8, 4), (128, 128, 8, 3), (256, 64, 8, 4), (128, 64, 4, 4), (128, 64, 8, 5),
        (64, 128, 4, 4), (64, 64, 4, 5),
    ]  # fmt: skip
    found = [
        FixedGemmTile(bm, bn, 64, warps, stages, False, True, persistent)
        for persistent in (False, True)
        for bm, bn, warps, stages in sizes
    ]
    found += [FixedGemmTile(64, 256, 64, 8, 3, False, True), FixedGemmTile(128, 128, 64, 8, 4)]
    return [t for t in found if m < MANY_ROWS or 2 * t.block_m * t.block_n >= LARGE_TILE]
