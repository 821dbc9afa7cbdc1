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


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Matrix times vector: outputs per program, K per tile, warps."""

    block_n: int
    block_k: int
    num_warps: int


_GEMV_TILES: dict[tuple[int, int], GemvTile] = {
    # (N, K)
    (4096, 1024): GemvTile(2, 512, 2),
    (1024, 2048): GemvTile(2, 2048, 8),
    (6144, 1024): GemvTile(2, 1024, 1),
    (1024, 3072): GemvTile(2, 4096, 4),
    (6144, 4096): GemvTile(2, 1024, 4),
    (4096, 4096): GemvTile(2, 2048, 2),
    (24576, 4096): GemvTile(2, 2048, 2),
    (4096, 12288): GemvTile(2, 2048, 2),
    (151936, 1024): GemvTile(8, 1024, 4),
    (151936, 4096): GemvTile(4, 1024, 4),
}


def gemv_tile(n: int, k: int) -> GemvTile:
    """Tile of gemv for a weight [n, k]."""
    tile = _GEMV_TILES.get((n, k))
    if tile is not None:
        return tile
    block_k = min(_power_of_2_up(k), 2048)
    return GemvTile(4 if n >= 32768 else 2, block_k, 2 if block_k <= 1024 else 4)


@dataclass(frozen=True, slots=True)
class SmallGemmTile:
    """Small-M GEMM: outputs per program, K per tile, parts of K, warps, stages, tiles asked for before the wait."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    prefetch_tiles: int = 2


_SMALL_GEMM_TILES: dict[tuple[int, int, int], SmallGemmTile] = {
    # (M bucket, N, K)
    (16, 4096, 1024): SmallGemmTile(16, 256, 1, 2, 4),
    (16, 1024, 2048): SmallGemmTile(16, 256, 4, 2, 4),
    (16, 6144, 1024): SmallGemmTile(32, 128, 1, 4, 6),
    (16, 1024, 3072): SmallGemmTile(16, 256, 4, 2, 4),
    (16, 4096, 4096): SmallGemmTile(32, 256, 1, 2, 6),
    (64, 4096, 1024): SmallGemmTile(32, 128, 1, 4, 4),
    (64, 1024, 3072): SmallGemmTile(16, 128, 2, 4, 6),
    (64, 6144, 4096): SmallGemmTile(64, 128, 1, 4, 6),
}


def small_gemm_tile(m: int, n: int, k: int) -> SmallGemmTile:
    """Tile of small_linear for m rows and a weight [n, k]."""
    bucket = max(16, _power_of_2_up(m))
    tile = _SMALL_GEMM_TILES.get((bucket, n, k))
    if tile is not None:
        return tile
    block_n = 16 if n <= 4096 else 32 if n <= 8192 else 64
    block_k = 256 if bucket == 16 and block_n <= 32 else 128
    block_k = min(block_k, max(16, _power_of_2_up(k)))
    split_k = 4 if n <= 1024 and k >= 2048 else 2 if n <= 2048 and k >= 1024 else 1
    return SmallGemmTile(block_n, block_k, split_k, 2 if block_n == 16 else 4, 4)


@dataclass(frozen=True, slots=True)
class FixedGemmTile:
    """Batch-invariant GEMM: block_k and the instruction are part of the numerics, the rest is speed."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def fixed_gemm_tile(m: int, n: int, dtype: torch.dtype) -> FixedGemmTile:
    """Tile of fixed_linear. Every choice runs 64-row matrix instructions over K in the same steps."""
    if dtype.itemsize == 4:
        return FixedGemmTile(64, 64, 32, 4, 2)
    if m <= 64:
        return FixedGemmTile(64, 32 if n <= 8192 else 64, 64, 4, 5)
    if m <= 128:
        return FixedGemmTile(128, 64 if n <= 8192 else 128, 64, 4, 4)
    return FixedGemmTile(128, 128 if n <= 2048 else 256, 64, 8, 3)


def _power_of_2_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
