"""Tiles of the batch-invariant GEMM: how K is cut is part of the numerics, all else is speed.

The table is `fixed_gemm_tiles.json` beside this file, written by `python -m bench.sweep_fixed_gemm
--write`. Shapes that are not in it get the rules below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

TABLE_PATH = Path(__file__).with_name("fixed_gemm_tiles.json")
M_BUCKETS = (16, 64, 128, 256, 512, 2048)
"""Row counts that have tiles of their own; beyond the last: the last."""
SPLIT_UNIT = 128
"""K is split at multiples of it, so that a split never depends on a tile's block_k."""
NUM_PROCESSORS = 132  # of the GPU that the rules were made for


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


@dataclass(frozen=True, slots=True)
class FixedGemmTable:
    """splits: (n, k) -> parts of K. tiles: (M bucket, n, k) -> tile. Of 16-bit types."""

    splits: dict[tuple[int, int], int]
    tiles: dict[tuple[int, int, int], FixedGemmTile]


def read_table(path: Path) -> FixedGemmTable:
    """Read the sweep's output; an empty table where there is none.

    Raises ValueError for a file that is no such table.
    """
    if not path.exists():
        return FixedGemmTable({}, {})
    try:
        shapes = json.loads(path.read_text(encoding="utf-8"))["shapes"]
        splits = {(s["n"], s["k"]): int(s["splits"]) for s in shapes}
        tiles = {
            (int(m), s["n"], s["k"]): FixedGemmTile(**fields)
            for s in shapes
            for m, fields in s["tiles"].items()
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of fixed GEMM tiles: {error!r}") from error
    return FixedGemmTable(splits, tiles)


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


def fixed_gemm_tile(m: int, n: int, k: int, dtype: torch.dtype) -> FixedGemmTile:
    """Tile of fixed_linear for m rows and a weight [n, k]."""
    if dtype.itemsize == 4:
        return FixedGemmTile(64, 64, 32, 4, 2)
    return _table().tiles.get((m_bucket(m), n, k)) or default_tile(m, n, k, dtype)


def default_tile(m: int, n: int, k: int, dtype: torch.dtype) -> FixedGemmTile:
    """The rule for 16-bit types: few rows are bound by bytes, many by whole waves of tiles."""
    splits = fixed_splits(n, k, dtype)
    if m <= 64:
        # Every column tile reads all of x: wider ones where x is not small.
        block_n = 32 if n * splits <= (8192 if m <= 16 else 4096) else 64
        return FixedGemmTile(64, block_n, 64, 4, 5, parallel=splits > 1)
    # (rows, columns, warps, stages) -> operations a processor does per unit of time, to compare.
    rates = {(128, 128, 8, 4): 0.86, (128, 64, 4, 4): 0.7, (64, 64, 4, 5): 0.5}
    if splits == 1:  # a second sum of this size does not fit into registers
        rates[128, 256, 8, 3] = 1.0

    def cost(shape: tuple[int, int, int, int]) -> float:
        tiles = -(-m // shape[0]) * -(-n // shape[1])
        return -(-tiles // NUM_PROCESSORS) * shape[0] * shape[1] / rates[shape]

    block_m, block_n, num_warps, num_stages = min(rates, key=cost)
    return FixedGemmTile(block_m, block_n, 64, num_warps, num_stages)
