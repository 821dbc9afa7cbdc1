"""Index tensors of one step, made once and used by every layer.

Attention's shapes depend on a token's position and its prompt's length alone, never on what else is
in the step: the last bits of a product follow from its shape. So prompt chunks are cut into tiles
at multiples of `TILE_TOKENS`, and contexts of decode rows are padded to multiples of
`PIECE_TOKENS`: behind that, more padding adds exact zeros at the end of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu.kv_cache import KvCache
from engine.cpu.tables import LongArray, RowTables
from engine.plan import StepPlan

TILE_TOKENS = 64
PIECE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows that compute one token each. B rows, padded to the same number of blocks.

    context: L, the padded length. block_table: int64 [B, blocks of L]. masks: window -> float32
    [B * kv heads, 1, L], 0 or -inf.
    """

    num_rows: int
    context: int
    block_table: torch.Tensor
    masks: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PromptTile:
    """One tile of a prompt chunk: tokens `start` .. `start + length - 1` of the step.

    piece_index: for `KvCache.gather`, None when nothing precedes the tile. masks: window -> bool
    [length, context] (True = visible), None where plain causal order says the same.
    """

    start: int
    length: int
    context: int
    piece_index: torch.Tensor | None
    masks: dict[int, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of a step, decode rows first.

    token_ids int64 [T]; positions int64 [T]; kv_index: where their k and v go; sample_tokens int64
    [S]: tokens whose hidden state is sampled from.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_index: LongArray
    decode: DecodeGroup | None
    tiles: tuple[PromptTile, ...]
    sample_tokens: torch.Tensor


def build_step_inputs(
    plan: StepPlan, tables: RowTables, cache: KvCache, windows: tuple[int, ...], kv_heads: int
) -> StepInputs:
    """Index tensors for `plan`, whose changes `tables` has taken over.

    windows: the distinct ones.
    """
    num_new = plan.num_new.astype(np.int64)
    ends = np.cumsum(num_new)
    starts = ends - num_new
    rows = np.repeat(plan.rows, num_new)
    within = np.arange(ends[-1]) - np.repeat(starts, num_new)
    positions = within + np.repeat(plan.num_computed.astype(np.int64), num_new)
    block_size = cache.block_size
    blocks = tables.blocks[rows, positions // block_size]
    decode = None
    if plan.num_decode:
        decode = _decode_group(plan, tables, cache, windows, kv_heads)
    tiles = tuple(
        _prompt_tile(int(plan.rows[i]), int(starts[i]) - computed, tile, tables, cache, windows)
        for i in range(plan.num_decode, len(plan.rows))
        for computed in (int(plan.num_computed[i]),)
        for tile in _cut(computed, computed + int(num_new[i]))
    )
    return StepInputs(
        token_ids=torch.from_numpy(tables.tokens[rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        kv_index=cache.vector_index(blocks, positions % block_size),
        decode=decode,
        tiles=tiles,
        sample_tokens=torch.from_numpy(ends[plan.sample] - 1),
    )


def _decode_group(
    plan: StepPlan, tables: RowTables, cache: KvCache, windows: tuple[int, ...], kv_heads: int
) -> DecodeGroup:
    rows = plan.rows[: plan.num_decode]
    positions = plan.num_computed[: plan.num_decode].astype(np.int64)
    multiple = math.lcm(PIECE_TOKENS, cache.block_size)
    columns = (int(positions.max()) // multiple + 1) * (multiple // cache.block_size)
    # Table entries behind a row's end are leftovers of its last owner.
    last = (positions // cache.block_size)[:, None]
    column = np.minimum(np.arange(columns)[None, :], last)
    blocks = tables.blocks[rows[:, None], column]
    table = torch.from_numpy(np.where(column == np.arange(columns), blocks, cache.pad_block))
    keys = torch.arange(columns * cache.block_size)
    distance = torch.from_numpy(positions)[:, None] - keys
    masks = {}
    for window in windows:
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        masks[window] = mask.repeat_interleave(kv_heads, dim=0)[:, None, :]
    return DecodeGroup(plan.num_decode, len(keys), table, masks)


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Tiles (start, end) of the positions start .. end - 1."""
    while start < end:
        stop = min(end, (start // TILE_TOKENS + 1) * TILE_TOKENS)
        yield start, stop
        start = stop


def _prompt_tile(
    row: int,
    offset: int,
    tile: tuple[int, int],
    tables: RowTables,
    cache: KvCache,
    windows: tuple[int, ...],
) -> PromptTile:
    """tile: (first position, position behind it); position + offset is the token in the step."""
    computed, context = tile
    piece_index = None
    if computed:
        columns = -(-context // cache.block_size)
        piece_index = cache.piece_index(torch.from_numpy(tables.blocks[row, :columns])[None, :])
    masks: dict[int, torch.Tensor | None] = {}
    for window in windows:
        if not computed and (not window or context <= window):
            masks[window] = None
            continue
        distance = torch.arange(computed, context)[:, None] - torch.arange(context)
        visible = distance >= 0
        if window:
            visible &= distance < window
        masks[window] = visible
    return PromptTile(computed + offset, context - computed, context, piece_index, masks)
