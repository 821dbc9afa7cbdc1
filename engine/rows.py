"""State of the rows, as one array per quantity. A run keeps its row from admission to its end.

The scheduler's hot path reads and writes these arrays for all rows of a step at once; Python
objects are touched only for rows that enter, leave or change. Lengths count tokens that launched
steps will have produced, so they run ahead of the ids known on the host.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.ring.records import Sampling
from engine.block_manager import NO_TAIL, ROOT, KeyTail
from engine.plan import IntArray, NewRow, RunnerInfo
from engine.request import ARRIVAL_BITS, Request, max_tokens_in_cache

BoolArray = npt.NDArray[np.bool_]
RowIndex = npt.NDArray[np.int64]

STOP_WIDTH = 8  # stop ids compared in the vectorised test; more go through a Python set

_PAUSED_RANK = 1 << 61  # beyond every order
_NEVER = np.iinfo(np.int32).max


class Phase:
    """What a row waits for. Plain numbers: reading a member of an Enum costs a tenth of a step's
    work.
    """

    FREE: Final = 0
    PROMPT: Final = 1  # tokens to compute before it can decode (a new run, or one that lost its KV)
    DECODE: Final = 2  # one token to compute, one block table to grow
    FULL: Final = 3  # its last token is in flight
    ENDED: Final = 4  # its end was published; freed when no step in flight touches it


def _ints(count: int) -> IntArray:
    return np.zeros(count, np.int32)


def _flags(count: int) -> BoolArray:
    return np.zeros(count, np.bool_)


def _ones(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """What the decode rows of a step compute; read-only, since plans hold pieces of it."""
    ones = np.ones(count, kind)
    ones.flags.writeable = False
    return ones


class RowTable:
    """Arrays indexed by row, for as many rows and tokens as a runner has room for."""

    def __init__(self, info: RunnerInfo) -> None:
        num_rows = self.num_rows = info.max_num_seqs
        block_size = self.block_size = info.block_size
        self.chunk_align_tokens = info.chunk_align_tokens
        self.replays_by_decode = info.replays_by_decode
        # Blocks in the shortest prefix that both a block and a piece of a prompt end with.
        self.hit_multiple = math.lcm(info.chunk_align_tokens, block_size) // block_size
        self.phase = np.zeros(num_rows, np.uint8)
        self.decodable = _flags(num_rows)  # phase DECODE, not paused, not losing its KV
        self.paused = _flags(num_rows)
        self.losing_kv = _flags(num_rows)  # preempted; its KV goes when no step in flight uses it
        self.losing_row = _flags(num_rows)  # and its row too
        self.ended = _flags(num_rows)
        self.started = _flags(num_rows)  # its prompt was computed once: `started` is published
        self.length = _ints(num_rows)  # tokens there are once the launched steps are done
        self.computed = _ints(num_rows)  # tokens whose KV is there once the launched steps are done
        self.known = _ints(num_rows)  # tokens whose ids the host has
        self.limit = _ints(num_rows)
        self.min_position = _ints(num_rows)
        self.cached_tokens = _ints(num_rows)  # prompt tokens from the prefix cache, first admission
        self.chunk_end = _ints(num_rows)  # tokens from here on are computed by decode rows
        self.num_blocks = _ints(num_rows)
        self.num_told = _ints(num_rows)  # leading blocks that the runner's table has
        self.has_changes = False  # whether a row may have blocks that it has not
        self.capacity = _ints(num_rows)  # num_blocks * block_size
        self.num_registered = _ints(num_rows)  # leading blocks offered to the prefix cache
        self.next_register = _ints(num_rows)  # (num_registered + 1) * block_size
        self.in_flight = _ints(num_rows)  # launched steps, not yet collected, that touch the row
        self.order = np.zeros(num_rows, np.int64)
        self.rid = np.zeros(num_rows, np.uint64)
        self.stop_ids = np.full((STOP_WIDTH, num_rows), -1, np.int32)
        self.max_stop_ids = 0  # most stop ids of a row since the table was last empty
        self.many_stop_ids: dict[int, frozenset[int]] = {}  # rows with more than STOP_WIDTH
        self._make_tables(max_tokens_in_cache(info))
        self.salt = [0] * num_rows
        self.tail: list[KeyTail] = [NO_TAIL] * num_rows
        self.chain = [ROOT] * num_rows  # prefix cache serial of the last registered block
        self.one_token, self.all_sample = (_ones(num_rows, kind) for kind in (np.int32, np.bool_))
        self.requests: list[Request | None] = [None] * num_rows
        self.row_of: dict[int, int] = {}  # live runs only
        self._free = list(range(num_rows - 1, -1, -1))

    def _make_tables(self, max_len: int) -> None:
        """Token ids and block tables, with room for `max_len` tokens a row."""
        self.tokens = np.zeros((self.num_rows, max_len), np.int32)
        self.flat_tokens = self.tokens.reshape(-1)
        self.token_offset = np.arange(self.num_rows, dtype=np.int64) * max_len
        self.table = np.zeros((self.num_rows, -(-max_len // self.block_size)), np.int32)

    @property
    def num_free(self) -> int:
        """Rows that a new run can have at once."""
        return len(self._free)

    def request(self, row: int) -> Request:
        """The run that holds a row."""
        request = self.requests[row]
        if request is None:
            raise LookupError(f"row {row} is free")
        return request

    def blocks_of(self, row: int) -> list[int]:
        """The row's blocks in order of position."""
        blocks: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        return blocks

    def holders(self) -> BoolArray:
        """bool [rows]: rows with KV that may be preempted."""
        holders: BoolArray = (self.num_blocks > 0) & (self.phase != Phase.FULL)
        holders &= ~self.losing_kv & ~self.ended
        return holders

    def yields_to(self, order: int) -> BoolArray:
        """bool [rows]: rows that give way to a run of this order that wants to enter."""
        yielding: BoolArray = self.paused | (self.order >> ARRIVAL_BITS > order >> ARRIVAL_BITS)
        return yielding

    def last_of(self, choice: BoolArray) -> int | None:
        """The chosen row that comes last in the order, paused rows after all others."""
        rows = np.flatnonzero(choice)
        if len(rows) == 0:
            return None
        return int(rows[np.argmax(self.order[rows] + _PAUSED_RANK * self.paused[rows])])

    def occupy(self, request: Request) -> int:
        """Give a free row to a run; it has no KV yet."""
        row = self._free.pop()
        length = len(request.token_ids)
        self.requests[row] = request
        self.row_of[request.rid] = row
        self.rid[row] = request.rid
        self.phase[row] = Phase.PROMPT
        self.started[row] = request.is_started
        self.length[row] = self.known[row] = length
        self.tokens[row, :length] = request.token_ids
        self.limit[row] = request.limit_tokens
        self.min_position[row] = request.min_position
        self.order[row] = request.order
        self.salt[row] = request.cache_salt
        self.chunk_end[row] = request.num_prompt_tokens if self.replays_by_decode else _NEVER
        self.tail[row] = self._key_tail(request.num_prompt_tokens)
        stop = request.stop_token_ids
        self.max_stop_ids = max(self.max_stop_ids, len(stop)) if len(self.row_of) > 1 else len(stop)
        self.stop_ids[:, row] = -1
        if len(stop) <= STOP_WIDTH:
            self.stop_ids[: len(stop), row] = stop
        else:
            self.many_stop_ids[row] = frozenset(stop.tolist())
        self.clear_kv(row)
        return row

    def _key_tail(self, num_prompt_tokens: int) -> KeyTail:
        """What tells this run's KV from that of equal tokens in a prompt of another length.

        The piece of a prompt behind the last multiple of chunk_align_tokens is shorter than others,
        and output is computed another way; only a prompt that ends at the same token has the same.
        """
        if not self.replays_by_decode:
            return NO_TAIL
        full_pieces = num_prompt_tokens - num_prompt_tokens % self.chunk_align_tokens
        return KeyTail(full_pieces // self.block_size, num_prompt_tokens.to_bytes(4, "little"))

    def clear_kv(self, row: int) -> None:
        """Forget the row's blocks (they were given back) and what was computed in them."""
        self.computed[row] = self.num_blocks[row] = self.num_told[row] = self.capacity[row] = 0
        self.set_registered(row, 0, ROOT)

    def set_registered(self, row: int, num_blocks: int, serial: int) -> None:
        """The row's first `num_blocks` blocks are in the prefix cache, the last one under
        `serial`.
        """
        self.num_registered[row] = num_blocks
        self.next_register[row] = (num_blocks + 1) * self.block_size
        self.chain[row] = serial

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        """Extend the row's block table."""
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)
        self.has_changes = True
        self.capacity[row] = (start + len(blocks)) * self.block_size

    def take_changes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Block table entries (rows, columns, ids; int32 [D]) that the runner has not been told,
        each once.

        Read from the tables as they are now: a row may gain, lose and gain blocks between two
        plans, and only the last of it counts.
        """
        rows = _NO_ROWS
        if self.has_changes:
            rows = np.flatnonzero(self.num_blocks != self.num_told)
            self.has_changes = False
        if len(rows) == 0:
            return _NONE, _NONE, _NONE
        told = self.num_told[rows]
        counts = self.num_blocks[rows] - told
        self.num_told[rows] = self.num_blocks[rows]
        cols = told
        if int(counts.sum()) > len(rows):
            cols = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts - told, counts)
            rows = np.repeat(rows, counts)
        return rows.astype(np.int32), cols.astype(np.int32), self.table[rows, cols]

    def end(self, row: int) -> None:
        """The run is over: its rid means nothing any more; the row waits for the steps in
        flight.
        """
        self.phase[row] = Phase.ENDED
        self.ended[row] = True
        self.decodable[row] = False
        del self.row_of[int(self.rid[row])]

    def vacate(self, row: int) -> None:
        """Free a row whose blocks were given back and that no step in flight touches."""
        rid = int(self.rid[row])
        if self.row_of.get(rid) == row:  # an ended run's id may be in use again
            del self.row_of[rid]
        self.requests[row] = None
        self.many_stop_ids.pop(row, None)
        self.phase[row] = Phase.FREE
        for flag in (self.decodable, self.paused, self.losing_kv, self.losing_row, self.ended):
            flag[row] = False
        self._free.append(row)

    def new_row(self, row: int) -> NewRow:
        """What the runner must know before the row's first step."""
        request = self.request(row)
        sampling: Sampling = request.sampling
        return NewRow(
            row=row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling,
            stop_token_ids=request.stop_token_ids,
            min_position=request.min_position,
        )


_NONE: IntArray = np.zeros(0, np.int32)
_NO_ROWS: RowIndex = np.zeros(0, np.int64)
