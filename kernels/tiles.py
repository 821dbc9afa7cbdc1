"""Tile choices: tables filled by the sweeps in bench/, read at launch. Nothing is tuned while
serving.

Measured on one H200 unless a line says otherwise. A shape that is not in a table gets the nearest
rule below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeGroups:
    """Tiles in one group of decode attention's fold, by the number of tiles that a row attends to.

    Part of the numerics, so it depends on the row's own length alone. Powers of two. A group is
    also the middle size of a work item: small enough that a few rows of this length fill the GPU,
    large enough that loads overlap and a row leaves few partial results.
    """

    up_to_16: int = 2
    up_to_64: int = 4
    beyond: int = 8


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Decode attention: tokens per tile, warps, pipeline stages, programs per processor, registers
    per thread (0: as the compiler likes), groups of the fold, and whether a tile is loaded by one
    instruction (where a KV block holds whole tiles of a two-byte type).

    Tokens, warps and groups are part of the numerics.
    """

    tile_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int = 0
    groups: DecodeGroups = DecodeGroups()
    tma: bool = False


_DECODE_TILES: dict[tuple[int, int], DecodeTile] = {
    # (head_dim, element bytes)
    (64, 2): DecodeTile(64, 4, 3, 3, 168, groups=DecodeGroups(4, 8, 16), tma=True),
    (96, 2): DecodeTile(64, 4, 2, 4),
    (128, 2): DecodeTile(64, 4, 3, 2, tma=True),
    (256, 2): DecodeTile(32, 4, 2, 2),
    (64, 4): DecodeTile(64, 4, 2, 2),
    (96, 4): DecodeTile(32, 4, 2, 2),
    (128, 4): DecodeTile(32, 4, 2, 2),
    (256, 4): DecodeTile(16, 4, 2, 1),
}

_FEW_ROWS_TILES: dict[tuple[int, int], tuple[tuple[int, DecodeTile], ...]] = {
    # (head_dim, element bytes): (most rows, tile), .... Few rows have fewer items than there are
    # processors: what counts is how soon one item is done, whatever its length.
    (64, 2): (
        (1, DecodeTile(64, 4, 4, 1, tma=True)),
        (16, DecodeTile(64, 4, 4, 2, tma=True)),
        (128, DecodeTile(64, 4, 5, 3, 168, tma=True)),
    ),
    (128, 2): ((1, DecodeTile(64, 4, 3, 1, tma=True)),),
}

_SAME_BITS_TILES: dict[tuple[int, int], DecodeTile] = {
    # Where the order of sums is fixed: more arithmetic between loads, which come further ahead.
    (128, 2): DecodeTile(64, 4, 4, 2, tma=True),
}

WIDE_HIDDEN = 4096

NUM_PROCESSORS = 132
"""Of the GPU that the rules were made for."""

_WIDE_FEW_ROWS_TILES: dict[tuple[int, int], tuple[tuple[int, DecodeTile], ...]] = {
    # The same for models from WIDE_HIDDEN on, whose products leave all shared memory to attention.
    (128, 2): ((1, DecodeTile(64, 4, 3, 1, tma=True)), (16, DecodeTile(64, 4, 4, 2, tma=True))),
}


def shared_percent(num_rows: int, hidden_size: int, head_dim: int) -> int | None:
    """Share of a processor's fast memory that the kernels of a decode step ask for as shared memory
    (see `kernels.carveout`); None: as the driver likes. Measured on one H200 with whole steps.

    One row's products keep their loads in the L1 cache; few rows' wait in shared memory, beside the
    tiles of attention. Of more rows those of a wide model fill all shared memory that there is.
    """
    if num_rows == 1:
        return 40 if head_dim <= 64 else 50
    if num_rows <= 16 and hidden_size < WIDE_HIDDEN:
        return 50 if head_dim <= 64 else 75
    return None


def decode_tiles(
    head_dim: int, dtype: torch.dtype, same_bits: bool = False, hidden_size: int = 0
) -> tuple[tuple[int, DecodeTile], ...]:
    """Tiles of decode attention as (most rows, tile) with rising numbers of rows; the last one is
    for any number.

    same_bits: a row's result shall be the same in every batch, so there is one tile. hidden_size:
    of the model around it, 0: any.
    """
    key = (head_dim, dtype.itemsize)
    few = _FEW_ROWS_TILES.get(key, ())
    if hidden_size >= WIDE_HIDDEN:
        few = _WIDE_FEW_ROWS_TILES.get(key, few)
    most = _DECODE_TILES.get(key, DecodeTile(32, 4, 2, 2))
    if same_bits:
        few, most = (), _SAME_BITS_TILES.get(key, most)
    return (*few, (1 << 30, most))


def decode_tile(
    head_dim: int,
    dtype: torch.dtype,
    num_rows: int = 1 << 30,
    same_bits: bool = False,
    hidden_size: int = 0,
) -> DecodeTile:
    """The tile of `decode_tiles` for a batch of num_rows."""
    tiles = decode_tiles(head_dim, dtype, same_bits, hidden_size)
    return next(tile for most, tile in tiles if num_rows <= most)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Prompt attention: rows of the dot (tokens times group heads), keys per tile, warps, stages,
    and whether a tile is loaded by one instruction (where a KV block holds whole tiles)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


_PREFILL_TILES: dict[tuple[int, int], PrefillTile] = {
    (64, 2): PrefillTile(64, 64, 4, 3, tma=True),
    (96, 2): PrefillTile(128, 64, 8, 2),
    (128, 2): PrefillTile(64, 64, 4, 3, tma=True),
    (256, 2): PrefillTile(64, 32, 4, 2),
}


def prefill_tile(head_dim: int, group_heads: int, dtype: torch.dtype) -> PrefillTile:
    """Tile of prompt attention for a head size, GQA group and data type."""
    del group_heads
    if dtype.itemsize == 4:  # exact products: larger tiles spill kilobytes of registers
        return PrefillTile(64, 32, 8, 2) if head_dim <= 64 else PrefillTile(16, 16, 4, 2)
    tile = _PREFILL_TILES.get((head_dim, dtype.itemsize))
    return tile if tile is not None else PrefillTile(64, 32, 4, 2)
