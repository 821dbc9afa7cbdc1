"""Tiles of the batch-invariant GEMM: how K is cut is part of the numerics, all else is speed.

The table is `fixed_gemm_tiles.json` beside this file, written by `python -m bench.sweep_fixed_gemm
--write`. Shapes that are not in it get the rules below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.tiles import NUM_PROCESSORS

TABLE_PATH = Path(__file__).with_name("fixed_gemm_tiles.json")
M_BUCKETS = (16, 64, 128, 256, 512, 2048, 8192)
"""Row counts that have tiles of their own; beyond the last: the last."""
SPLIT_UNIT = 128
"""K is split at multiples of it, so that a split never depends on a tile's block_k."""
FEW_ROWS = 64
"""Up to here a product is bound by the bytes of its weight."""


@dataclass(frozen=True, slots=True)
class FixedGemmTile:
    """block_k is a multiple of the matrix instruction's K, and every instruction adds to the same
    sum in order, so no field changes a bit of the result. parallel: splits of K run in programs of
    their own. tma: tiles come through descriptors. persistent: a program takes several tiles."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    parallel: bool = False
    tma: bool = False
    persistent: bool = False

    def stage_bytes(self, glu: bool, element_bytes: int) -> int:
        """Bytes that one step over K reads into shared memory; glu: of two weights."""
        return (self.block_m + self.block_n * (2 if glu else 1)) * self.block_k * element_bytes


@dataclass(frozen=True, slots=True)
class FixedGemmTable:
    """splits: (n, k) -> parts of K. tiles: (M bucket, n, k) -> tile; glu: the same of products that
    end in an activation, n counts their outputs. Of 16-bit types."""

    splits: dict[tuple[int, int], int]
    tiles: dict[tuple[int, int, int], FixedGemmTile]
    glu: dict[tuple[int, int, int], FixedGemmTile]


def read_table(path: Path) -> FixedGemmTable:
    """Read the sweep's output; an empty table where there is none.

    Raises ValueError for a file that is no such table.
    """
    if not path.exists():
        return FixedGemmTable({}, {}, {})
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        splits = {(s["n"], s["k"]): int(s["splits"]) for s in table["shapes"]}
        return FixedGemmTable(splits, _tiles(table["shapes"]), _tiles(table["glu"]))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of fixed GEMM tiles: {error!r}") from error


def _tiles(shapes: list[dict[str, Any]]) -> dict[tuple[int, int, int], FixedGemmTile]:
    return {
        (int(m), shape["n"], shape["k"]): FixedGemmTile(**fields)
        for shape in shapes
        for m, fields in shape["tiles"].items()
    }


@cache
def _table() -> FixedGemmTable:
    return read_table(TABLE_PATH)


def m_bucket(m: int) -> int:
    """The row count whose tiles m rows use."""
    return next((bucket for bucket in M_BUCKETS if m <= bucket), M_BUCKETS[-1])


def fixed_splits(n: int, k: int, dtype: torch.dtype) -> int:
    """Parts that K is summed in, for every M: where N is too small to fill the GPU at few rows."""
    found = _table().splits.get((n, k)) if dtype.itemsize == 2 else None
    if found is not None:
        return found
    if n <= 1024 and k >= 2048:
        return 4
    return 2 if n <= 4096 and k >= 4096 else 1


def fixed_gemm_tile(m: int, n: int, k: int, dtype: torch.dtype, glu: bool = False) -> FixedGemmTile:
    """Tile of fixed_linear for m rows and n outputs."""
    if dtype.itemsize == 4:
        return FixedGemmTile(64, 64, 32, 4, 2)
    key = (m_bucket(m), n, k)
    if glu:
        return _table().glu.get(key) or default_glu_tile(m, n)
    return _table().tiles.get(key) or default_tile(m, n, k, dtype)


def has_glu_tile(m: int, n: int, k: int) -> bool:
    """Whether the sweep has measured this product with its activation (16-bit types)."""
    return (m_bucket(m), n, k) in _table().glu


# (rows, columns, warps, stages) -> operations a processor does per unit of time, to compare.
_RATES = {(128, 128, 8, 4): 0.86, (128, 64, 4, 4): 0.7, (64, 64, 4, 5): 0.5}
_WIDE_RATES = _RATES | {(128, 256, 8, 3): 1.0}
_GLU_RATES = {(128, 128, 8, 4): 1.0, (128, 64, 4, 4): 0.86, (64, 64, 4, 4): 0.7}


def default_tile(m: int, n: int, k: int, dtype: torch.dtype) -> FixedGemmTile:
    """The rule for 16-bit types: few rows are bound by bytes, many by whole waves of tiles."""
    splits = fixed_splits(n, k, dtype)
    if m <= FEW_ROWS:
        if m <= 16:
            block_k = _even_block_k(
                -(-k // (splits * SPLIT_UNIT)) * SPLIT_UNIT if splits > 1 else k
            )
            if n * splits <= 16384:
                return FixedGemmTile(16, 16, block_k, 2, 4, parallel=splits > 1)
            return FixedGemmTile(16, 64, min(block_k, 128), 4, 4)
        # Every column tile reads all of x: wider ones where x is not small.
        block_n = 32 if n * splits <= 4096 else 64
        return FixedGemmTile(64, block_n, 64, 4, 5, parallel=splits > 1)
    # Where K is split, a second sum of the widest tile does not fit into registers.
    return _cheapest(_WIDE_RATES if splits == 1 else _RATES, m, n, persistent=splits == 1)


def default_glu_tile(m: int, n: int) -> FixedGemmTile:
    """The same rule for a product with its activation, whose tile has two sums."""
    if m <= 16:
        return FixedGemmTile(16, 32, 128, 4, 4)
    if m <= FEW_ROWS:
        return FixedGemmTile(64, 32, 64, 4, 6, tma=True)
    return _cheapest(_GLU_RATES, m, n, persistent=True)


def _even_block_k(length: int) -> int:
    """Columns a tile, so that a part of K of this length is whole tiles where it can be."""
    return next((block_k for block_k in (256, 128) if length % block_k == 0), 64)


def _cheapest(
    rates: dict[tuple[int, int, int, int], float], m: int, n: int, persistent: bool
) -> FixedGemmTile:
    """The shape that needs the least time by its rate and its number of waves."""

    def waves(shape: tuple[int, int, int, int]) -> int:
        return -(-(-(-m // shape[0]) * -(-n // shape[1])) // NUM_PROCESSORS)

    def cost(shape: tuple[int, int, int, int]) -> float:
        return waves(shape) * shape[0] * shape[1] / rates[shape]

    best = min(rates, key=cost)
    block_m, block_n, num_warps, num_stages = best
    # A program that takes several tiles loads the next one's while it stores.
    is_long = persistent and waves(best) > 1
    return FixedGemmTile(block_m, block_n, 64, num_warps, num_stages, tma=True, persistent=is_long)
