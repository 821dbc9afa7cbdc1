"""Tile choices: tables filled by the sweeps in bench/, read at launch. Nothing is tuned while serving.

Measured on one H200 unless a line says otherwise. A shape that is not in a table gets the nearest rule below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Decode attention: tokens per tile (part of the numerics), warps, pipeline stages, programs per processor."""

    tile_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


_DECODE_TILES: dict[tuple[int, int], DecodeTile] = {
    # (head_dim, element bytes)
    (64, 2): DecodeTile(128, 4, 2, 4),
    (96, 2): DecodeTile(64, 4, 2, 4),
    (128, 2): DecodeTile(64, 4, 3, 4),
    (256, 2): DecodeTile(32, 4, 2, 2),
    (64, 4): DecodeTile(64, 4, 2, 2),
    (96, 4): DecodeTile(32, 4, 2, 2),
    (128, 4): DecodeTile(32, 4, 2, 2),
    (256, 4): DecodeTile(16, 4, 2, 1),
}


def decode_tile(head_dim: int, group_heads: int, dtype: torch.dtype) -> DecodeTile:
    """Tile of decode attention for a head size, GQA group and data type."""
    del group_heads  # groups of up to 16 share one tile: M is padded to 16 anyway
    tile = _DECODE_TILES.get((head_dim, dtype.itemsize))
    return tile if tile is not None else DecodeTile(32, 4, 2, 2)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Prompt attention: rows of the dot (tokens times group heads), keys per tile, warps, stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_PREFILL_TILES: dict[tuple[int, int], PrefillTile] = {
    (64, 2): PrefillTile(128, 64, 4, 3),
    (96, 2): PrefillTile(128, 64, 8, 2),
    (128, 2): PrefillTile(128, 64, 8, 3),
    (256, 2): PrefillTile(64, 32, 4, 2),
}


def prefill_tile(head_dim: int, group_heads: int, dtype: torch.dtype) -> PrefillTile:
    """Tile of prompt attention for a head size, GQA group and data type."""
    del group_heads
    tile = _PREFILL_TILES.get((head_dim, dtype.itemsize))
    return tile if tile is not None else PrefillTile(64, 32, 4, 2)
