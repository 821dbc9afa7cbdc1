"""Makes the full blocks of rows known to the prefix cache, or strikes them from it."""

from __future__ import annotations

import numpy as np

from engine.block_manager import BlockManager
from engine.rows import RowIndex, RowTable

_NEVER = np.iinfo(np.int32).max


def register_full_blocks(t: RowTable, blocks: BlockManager, row: int) -> None:
    """Offer all full blocks of a row whose tokens the host knows; their steps must be launched."""
    if not blocks.enable_prefix_cache:
        return
    first = t.num_registered.item(row)
    full = min(t.known.item(row), t.computed.item(row)) // t.block_size
    if full <= first:
        return
    size = 4 * t.block_size
    data = t.tokens[row, first * t.block_size : full * t.block_size].tobytes()
    salt, serial = t.salt[row], t.chain[row]
    tail = t.tail[row]
    for i, block in enumerate(t.table[row, first:full].tolist()):
        tokens = data[i * size : (i + 1) * size]
        if first + i >= tail.first_block:
            tokens += tail.data
        serial = blocks.register(block, serial, salt, tokens)
    t.set_registered(row, full, serial)


def register_next_blocks(t: RowTable, blocks: BlockManager, rows: RowIndex) -> None:
    """Offer one more full block of each of these rows (int64 [N]), all at once: for the hot path.

    The tokens of that block are known and the step that wrote its last one was launched.
    """
    size = 4 * t.block_size
    first = t.num_registered[rows]
    at = t.token_offset[rows] + first.astype(np.int64) * t.block_size
    data = t.flat_tokens[at[:, None] + np.arange(t.block_size)].tobytes()
    next_blocks = t.table[rows, first].tolist()
    for i, (row, index) in enumerate(zip(rows.tolist(), first.tolist(), strict=True)):
        tokens = data[i * size : (i + 1) * size]
        if index >= t.tail[row].first_block:
            tokens += t.tail[row].data
        t.chain[row] = blocks.register(next_blocks[i], t.chain[row], t.salt[row], tokens)
    t.num_registered[rows] = first + 1
    t.next_register[rows] += t.block_size


def distrust_row(t: RowTable, blocks: BlockManager, row: int) -> None:
    """Keep a row's blocks out of the prefix cache from now on: their values are not finite."""
    blocks.forget(t.blocks_of(row))
    t.computed[row] = 0
    t.next_register[row] = _NEVER
