"""Tile choices of decode steps' products: tables filled by bench/sweep_gemm.py and
bench/step_search.py, read at launch.

Measured on one H200. A shape that is not in a table gets the nearest rule below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.tiles import NUM_PROCESSORS, WIDE_HIDDEN


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Matrix times vector: outputs per program, K per tile, warps."""

    block_n: int
    block_k: int
    num_warps: int


_GEMV_TILES: dict[tuple[int, int], GemvTile] = {
    # (N, K); bench/sweep_gemm.py on one H200, bf16, fused as in the model, dependent launches
    (576, 576): GemvTile(2, 1024, 1),  # 1.15 us, 0.58 TB/s
    (960, 576): GemvTile(2, 1024, 1),  # 1.52 us, 0.73 TB/s
    (576, 1536): GemvTile(2, 2048, 2),  # 1.63 us, 1.09 TB/s
    (1536, 576): GemvTile(2, 1024, 4),  # 2.38 us, 1.49 TB/s
    (1024, 2048): GemvTile(2, 2048, 1),  # 2.41 us, 1.74 TB/s
    (1024, 3072): GemvTile(2, 1024, 1),  # 3.29 us, 1.91 TB/s
    (3072, 1024): GemvTile(2, 1024, 1),  # 4.18 us, 3.01 TB/s
    (4096, 1024): GemvTile(4, 1024, 4),  # 3.41 us, 2.46 TB/s
    (4096, 4096): GemvTile(2, 512, 1),  # 9.48 us, 3.54 TB/s
    (6144, 4096): GemvTile(2, 4096, 4),  # 14.36 us, 3.51 TB/s
    (49152, 576): GemvTile(8, 1024, 4),  # 17.57 us, 3.22 TB/s
    (4096, 12288): GemvTile(2, 2048, 1),  # 25.38 us, 3.97 TB/s
    (12288, 4096): GemvTile(2, 1024, 2),  # 45.71 us, 4.4 TB/s
    (151936, 1024): GemvTile(4, 1024, 4),  # 71.1 us, 4.38 TB/s
    (151936, 4096): GemvTile(4, 2048, 8),  # 315.49 us, 3.95 TB/s
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
    """Small-M GEMM: outputs per program, K per tile, parts of K, warps, stages, tiles asked for
    before the wait, and whether a tile is loaded by one instruction (of a two-byte type)."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    prefetch_tiles: int = 2
    tma: bool = False

    def stage_bytes(self, block_m: int, glu: bool, element_bytes: int) -> int:
        """Bytes that one step over K reads into shared memory; glu: of two weights."""
        return (block_m + self.block_n * (2 if glu else 1)) * self.block_k * element_bytes


_SMALL_GEMM_TILES: dict[tuple[int, int, int], SmallGemmTile] = {
    # (M bucket, N, K); bench/sweep_gemm.py on one H200, bf16, fused as in the model, at M = 8 and
    # 64
    (16, 576, 576): SmallGemmTile(16, 128, 1, 4, 6),  # 2.52 us, 0.26 TB/s
    (64, 576, 576): SmallGemmTile(16, 128, 1, 4, 6),  # 2.8 us, 0.24 TB/s
    (16, 960, 576): SmallGemmTile(32, 128, 1, 4, 5),  # in whole steps 2.2 us faster than 16, 128
    (64, 960, 576): SmallGemmTile(16, 128, 1, 4, 6),  # 2.6 us, 0.43 TB/s
    (16, 576, 1536): SmallGemmTile(32, 256, 2, 4, 4),  # 3.79 us, 0.47 TB/s
    (64, 576, 1536): SmallGemmTile(16, 128, 2, 4, 6),  # 4.0 us, 0.44 TB/s
    (16, 1536, 576): SmallGemmTile(32, 128, 1, 4, 4),  # 3.72 us, 0.95 TB/s
    (64, 1536, 576): SmallGemmTile(64, 64, 1, 4, 4),  # 4.62 us, 0.77 TB/s
    (16, 1024, 2048): SmallGemmTile(16, 256, 4, 2, 4),  # 4.65 us, 0.9 TB/s
    (64, 1024, 2048): SmallGemmTile(16, 128, 2, 4, 6),  # 4.56 us, 0.92 TB/s
    (16, 1024, 3072): SmallGemmTile(16, 256, 4, 2, 4),  # 5.04 us, 1.25 TB/s
    (64, 1024, 3072): SmallGemmTile(16, 128, 2, 4, 6),  # 5.28 us, 1.19 TB/s
    (16, 3072, 1024): SmallGemmTile(32, 128, 1, 4, 6, 4),  # in whole steps 5 us faster than 4, 2
    (64, 3072, 1024): SmallGemmTile(16, 128, 1, 4, 4),  # 6.48 us, 1.94 TB/s
    (16, 4096, 1024): SmallGemmTile(16, 128, 1, 2, 8),  # in whole steps 0.6 us faster than 16, 256
    (64, 4096, 1024): SmallGemmTile(64, 128, 1, 4, 4),  # 4.65 us, 1.81 TB/s
    (16, 4096, 4096): SmallGemmTile(16, 256, 2, 2, 4),  # 11.76 us, 2.85 TB/s
    (64, 4096, 4096): SmallGemmTile(64, 128, 2, 4, 4),  # 12.19 us, 2.75 TB/s
    (16, 6144, 4096): SmallGemmTile(32, 128, 2, 4, 6),  # in whole steps 22 us faster than 16, 256
    (64, 6144, 4096): SmallGemmTile(64, 128, 1, 4, 4),  # 16.62 us, 3.03 TB/s
    (16, 49152, 576): SmallGemmTile(128, 64, 1, 4, 5),  # 15.55 us, 3.64 TB/s
    (64, 49152, 576): SmallGemmTile(64, 64, 1, 4, 6),  # 18.95 us, 2.99 TB/s
    (16, 4096, 12288): SmallGemmTile(16, 256, 2, 2, 4),  # 28.22 us, 3.57 TB/s
    (32, 4096, 12288): SmallGemmTile(32, 128, 2, 4, 4),  # in whole steps 67 us faster than 64, 128
    (64, 4096, 12288): SmallGemmTile(64, 128, 2, 4, 4),  # 29.85 us, 3.37 TB/s
    (16, 12288, 4096): SmallGemmTile(32, 128, 1, 4, 4),  # 48.5 us, 4.15 TB/s
    # By descriptors, in whole steps 55 us faster than 32, 128 by pointers.
    (64, 12288, 4096): SmallGemmTile(64, 64, 1, 4, 4, tma=True),
    (16, 151936, 1024): SmallGemmTile(64, 128, 1, 4, 5),  # 74.8 us, 4.16 TB/s
    (64, 151936, 1024): SmallGemmTile(64, 64, 1, 4, 6),  # 82.85 us, 3.76 TB/s
    (16, 151936, 4096): SmallGemmTile(64, 128, 1, 4, 5),  # 282.76 us, 4.4 TB/s
    # By descriptors, in whole steps 22 us faster than 128, 64 by pointers.
    (64, 151936, 4096): SmallGemmTile(64, 64, 1, 4, 6, tma=True),
    # In whole steps, faster than the tile for 64 rows by so much: of 1,600 us at 128 rows, of 2,700
    # at 256, and for the wider model of 5,400.
    (128, 960, 576): SmallGemmTile(64, 64, 1, 4, 6),  # 14 us
    (256, 960, 576): SmallGemmTile(64, 64, 1, 4, 6, tma=True),  # 74 us
    (128, 576, 1536): SmallGemmTile(32, 128, 2, 4, 4),  # 21 us
    (256, 576, 1536): SmallGemmTile(64, 128, 1, 4, 4, tma=True),  # 113 us
    (128, 1536, 576): SmallGemmTile(64, 128, 1, 4, 3, tma=True),  # 46 us
    (256, 1536, 576): SmallGemmTile(64, 64, 1, 4, 4),
    (128, 4096, 1024): SmallGemmTile(64, 64, 1, 4, 6, tma=True),  # 15 us
    (128, 1024, 3072): SmallGemmTile(64, 128, 2, 4, 4, tma=True),  # 39 us
    (128, 3072, 1024): SmallGemmTile(64, 64, 1, 4, 4, tma=True),  # 130 us
    (128, 49152, 576): SmallGemmTile(128, 64, 1, 4, 4, tma=True),  # 6 us
    (128, 151936, 1024): SmallGemmTile(128, 64, 1, 4, 4, tma=True),  # 16 us
}


def max_fused_rows(hidden_size: int, dtype: torch.dtype) -> int:
    """Rows up to which small_linear makes a model's decode steps faster than cuBLAS, with launches
    for norms and activations between its products, does. dtype: of the weights; of those that
    cannot share norms (float16) or want exact products (float32) many rows were not measured."""
    if hidden_size > 1024 or dtype != torch.bfloat16:
        return 64
    return 128 if hidden_size == 1024 else 256


def small_gemm_tile(m: int, n: int, k: int, element_bytes: int = 2) -> SmallGemmTile:
    """Tile of small_linear for m rows and a weight [n, k]; element_bytes: of x and the weight."""
    if element_bytes == 4:
        # Twice the bytes a tile: two stages of these fit in shared memory for 64 rows.
        return SmallGemmTile(16, min(64, max(16, _power_of_2_up(k))), 1, 4, 2)
    for bucket in _buckets(m):
        tile = _SMALL_GEMM_TILES.get((bucket, n, k))
        if tile is not None:
            return tile
    if m > 16 and k >= WIDE_HIDDEN:
        return _long_gemm_tile(n)
    if m > 64:  # several row tiles read each weight
        return SmallGemmTile(64, 64, 1, 4, 6)
    block_n = 16 if n <= 4096 else 32 if n <= 8192 else 64
    block_k = 256 if m <= 16 and block_n <= 32 else 128
    block_k = min(block_k, max(16, _power_of_2_up(k)))
    split_k = 4 if n <= 1024 and k >= 2048 else 2 if n <= 2048 and k >= 1024 else 1
    return SmallGemmTile(block_n, block_k, split_k, 2 if block_n == 16 else 4, 4)


def _buckets(m: int) -> tuple[int, ...]:
    """Where a tile for m rows is looked for in the table, best first."""
    if m <= 32:
        return (16,) if m <= 16 else (32, 64)
    return (64,) if m <= 64 else (128, 64) if m <= 128 else (256, 128, 64)


def _long_gemm_tile(n: int) -> SmallGemmTile:
    """For more than 16 rows of a K as long as a wide model's: each column tile reads all of x, so
    tiles are wide, with parts of K where too few of them would leave processors idle."""
    if n > 8192:
        return SmallGemmTile(64, 64, 1, 4, 4, tma=True)
    parts = NUM_PROCESSORS // -(-n // 64)
    return SmallGemmTile(64, 128, min(max(parts, 1), 4), 4, 4)


def _power_of_2_up(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
