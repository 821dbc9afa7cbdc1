"""Decides which runs hold rows and KV blocks: seating, growth, preemption, release.

Rules, all by one total order (priority, then arrival; a paused row comes last, a seated solo run
first):

- A decode row that needs a block may take it from any row after it in the order, else from itself.
  The first row of the order therefore always advances, so preemption cannot go on for ever.
- A run that enters (new, or after it lost its KV) takes KV only from paused rows and rows of a
  lower priority class, and leaves each running row one block to grow into. The head of the line is
  never overtaken.
- Rows are given up by paused runs and lower priority classes, when a run waits and none is free.
- A solo run, when its turn comes, is the only one computed until it ends or pauses; the others keep
  their rows, and their KV unless it needs it.
- Blocks and rows go back only when no step in flight touches them; until then they count as
  promised.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockManager, Match
from engine.errors import IntegrityError
from engine.plan import NewRow
from engine.prefix import register_full_blocks
from engine.request import Request, WaitingQueue, without_row
from engine.rows import Phase, RowIndex, RowTable

_SOLO_RANK = 1 << 60
_NOBODY = 1 << 62


class Residency:
    """Rows, blocks and the queue before them; the scheduler plans from what it keeps up to date.

    partial: (order, row) of runnable rows with KV and prompt tokens to compute. homeless: the same
    for runnable rows without KV. Rows that decode are marked in `rows.decodable`.
    """

    def __init__(self, rows: RowTable, blocks: BlockManager) -> None:
        self.rows = rows
        self.blocks = blocks
        self.waiting = WaitingQueue()
        self.partial: list[tuple[int, int]] = []
        self.homeless: list[tuple[int, int]] = []
        self.solo_rows: set[int] = set()
        self.closing: set[int] = set()  # rows that give back KV once no step in flight touches them
        self.new_rows: dict[int, NewRow] = {}  # seated, not yet told to the runner
        self.preemptions = 0

    # --- where plans look for rows ---

    def place(self, row: int) -> None:
        """Put a row into the list that its state belongs to, if it can run."""
        t = self.rows
        if t.paused[row] or t.losing_kv[row] or t.ended[row]:
            return
        if t.phase[row] == Phase.DECODE:
            t.decodable[row] = True
        elif t.phase[row] == Phase.PROMPT:
            insort(self.partial if t.num_blocks[row] else self.homeless, (int(t.order[row]), row))

    def displace(self, row: int) -> None:
        """Take a row out of those lists, before its state changes."""
        self.rows.decodable[row] = False
        entry = (int(self.rows.order[row]), row)
        for places in (self.partial, self.homeless):
            at = bisect_left(places, entry)
            if at < len(places) and places[at] == entry:
                del places[at]

    def is_partial(self, order: int, row: int) -> bool:
        """Whether this entry is in `partial`."""
        at = bisect_left(self.partial, (order, row))
        return at < len(self.partial) and self.partial[at] == (order, row)

    def take_new_rows(self) -> tuple[NewRow, ...]:
        """Rows seated since the last call, which the runner has not been told."""
        new_rows = tuple(self.new_rows.values())
        self.new_rows.clear()
        return new_rows

    # --- entering ---

    def next_order(self) -> int:
        """Place in the order of the first run that lacks row or KV; beyond all others if there
        is none.
        """
        head = self.waiting.peek()
        order = head.order if head is not None else _NOBODY
        return min(order, self.homeless[0][0]) if self.homeless else order

    def admit_next(self) -> int | None:
        """Give row and KV to the first run that lacks them; None if it must wait (or is to run
        alone).
        """
        head = self.waiting.peek()
        is_head_first = head is not None and head.order == self.next_order()
        if head is not None and is_head_first and (head.is_solo or self.seat(head) is None):
            return None
        if not self.homeless:
            return None
        row = self.homeless[0][1]
        return row if self.give_kv(row) else None

    def seat(self, head: Request) -> int | None:
        """Give a row to the first waiting run; None if none is free yet."""
        if self.rows.num_free == 0 and not self._clear_row_for(head):
            return None
        row = self.rows.occupy(self.waiting.pop())
        self.new_rows[row] = self.rows.new_row(row)
        if head.is_solo:
            self.solo_rows.add(row)
            self.rows.order[row] -= _SOLO_RANK
        self.place(row)
        return row

    def _clear_row_for(self, head: Request) -> bool:
        """Make a run of lower rank give up its row; False if it cannot be had at once."""
        t = self.rows
        if any(t.ended[row] or t.losing_row[row] for row in self.closing):
            return False
        yielding = (
            self.rows.yields_to(head.order) & (t.phase != Phase.FREE) & (t.phase != Phase.FULL)
        )
        victim = self.rows.last_of(yielding & ~t.ended)
        if victim is None:
            return False
        t.losing_row[victim] = True
        self.preempt(victim)
        return t.num_free > 0

    def give_kv(self, row: int) -> bool:
        """Give a row without KV the blocks of all its tokens, cached ones first; False if it
        must wait.
        """
        t, blocks = self.rows, self.blocks
        match, num_new = self._lookup(row)
        yielding = self.rows.yields_to(int(t.order[row]))
        num_growing = int(np.count_nonzero(t.decodable & ~yielding))
        wanted = num_new + blocks.count_free(match.blocks) + num_growing
        if wanted > blocks.num_free:
            if not self._make_room(wanted, yielding):
                return False
            match, num_new = self._lookup(row)  # what was freed may be cached blocks of this prefix
            if num_new + blocks.count_free(match.blocks) > blocks.num_free:
                return False
        self.displace(row)
        blocks.share(match.blocks)
        table = match.blocks + blocks.allocate(num_new)
        t.append_blocks(row, table)
        t.computed[row] = num_cached = len(match.blocks) * t.block_size
        t.set_registered(row, len(match.blocks), match.serial)
        if num_cached >= t.chunk_end[row]:
            t.phase[row] = Phase.DECODE
        if not t.started[row]:
            t.cached_tokens[row] = min(num_cached, t.request(row).num_prompt_tokens)
        self.place(row)
        return True

    def _lookup(self, row: int) -> tuple[Match, int]:
        """The row's cached prefix and how many blocks it needs besides; at least one token is
        left to compute.
        """
        t = self.rows
        length = int(t.length[row])
        most = min(int(t.known[row]), length - 1) // t.block_size
        match = self.blocks.match(t.tokens[row], t.salt[row], most, t.tail[row])
        num_hits = len(match.blocks)
        if num_hits * t.block_size < min(length, int(t.chunk_end[row])):
            num_hits -= num_hits % t.hit_multiple
        match = self.blocks.shorten(match, num_hits)
        return match, -(-length // t.block_size) - num_hits

    def _make_room(self, wanted: int, yielding: npt.NDArray[np.bool_]) -> bool:
        """Preempt rows that yield until `wanted` blocks are free; False if they cannot be had at
        once.
        """
        blocks = self.blocks
        yielding = yielding & self.rows.holders()
        if not self.closing and not np.count_nonzero(yielding):
            return False
        owners = {*self.closing, *np.flatnonzero(yielding).tolist()}
        tables = [self.rows.blocks_of(row) for row in owners]
        if blocks.num_free + blocks.count_reclaimable(tables) < wanted:
            return False
        while blocks.num_free + self.count_promised() < wanted:
            victim = self.rows.last_of(yielding)
            if victim is None:
                return False
            yielding[victim] = False
            self.preempt(victim)
        return blocks.num_free >= wanted

    # --- growth ---

    def grow(self, need: RowIndex) -> None:
        """Give each of these decode rows a block, or stop some of them (they leave `rows.decodable`
        or are stalled).

        Returns nothing: afterwards a row has room if computed < capacity.
        """
        t = self.rows
        if len(need) <= self.blocks.num_free:
            ids = np.array(self.blocks.allocate(len(need)), np.int32)
            cols = t.num_blocks[need]
            t.table[need, cols] = ids
            t.num_blocks[need] = cols + 1
            t.has_changes = True
            t.capacity[need] += t.block_size
            return
        num_claimed = 0
        for row in need[np.argsort(t.order[need])].tolist():
            if t.decodable[row]:  # not a victim of a row before it
                num_claimed += self._grow_scarce(row, num_claimed)

    def _grow_scarce(self, row: int, num_claimed: int) -> int:
        """Find a block for one row; returns 1 if it waits for a promised one."""
        while self.blocks.num_free == 0:
            if self.count_promised() > num_claimed:
                return 1
            victim = self.rows.last_of(self.rows.holders())
            if victim is None:
                raise IntegrityError(f"no block is free and no row holds one, wanted by row {row}")
            self.preempt(victim)
            if victim == row:
                return 0
        self.rows.append_blocks(row, self.blocks.allocate(1))
        return 0

    # --- leaving ---

    def preempt(self, row: int) -> None:
        """Take the KV of a row; it keeps row and place in the order, and computes its tokens
        again later.
        """
        t = self.rows
        self.displace(row)
        t.losing_kv[row] = True
        t.phase[row] = Phase.PROMPT
        self.preemptions += 1
        self._close(row)

    def end(self, row: int) -> None:
        """The run of a row is over; row and blocks go back when no step in flight touches them."""
        self.displace(row)
        self.solo_rows.discard(row)
        self.rows.end(row)
        self._close(row)

    def settle(self) -> None:
        """Give back what rows promised and no step in flight touches any more."""
        if self.closing:
            for row in [row for row in self.closing if self.rows.in_flight[row] == 0]:
                self.closing.discard(row)
                self._give_back(row)

    def _close(self, row: int) -> None:
        if self.rows.in_flight[row] == 0:
            self.closing.discard(row)
            self._give_back(row)
        else:
            self.closing.add(row)

    def _give_back(self, row: int) -> None:
        t = self.rows
        register_full_blocks(t, self.blocks, row)
        self.blocks.release(t.blocks_of(row))
        t.clear_kv(row)
        t.losing_kv[row] = False
        if t.ended[row]:
            self._vacate(row)
        elif t.losing_row[row]:
            is_held = bool(t.paused[row])
            tokens = t.tokens[row, : t.known[row]].copy()
            request = without_row(t.request(row), tokens, bool(t.started[row]))
            self._vacate(row)
            self.waiting.push(request, is_held)
        else:
            self.place(row)

    def _vacate(self, row: int) -> None:
        self.new_rows.pop(row, None)
        self.solo_rows.discard(row)
        self.rows.vacate(row)

    # --- who yields ---

    def count_promised(self) -> int:
        """Blocks that come back when the steps in flight are collected."""
        t = self.rows
        last = np.flatnonzero(t.phase == Phase.FULL).tolist()
        return self.blocks.count_reclaimable([t.blocks_of(r) for r in {*self.closing, *last}])
