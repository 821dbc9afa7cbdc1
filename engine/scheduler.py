"""Plans steps and takes in their results: one token budget a step for decode rows and prompt chunks
together.

The scheduler runs one step ahead: lengths and limits are known by counting, so step N+1 is planned
while step N computes and its token ids are still unknown here. What ids alone can tell (an
end-of-sequence token, non-finite logits) is found when a step is completed; a run that ended may
then be in the next step too, whose token for it is dropped. No torch, no I/O: `residency.py`
decides who holds rows and blocks, `loop.py` drives both.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from broker.ring.records import Finish, Reject, Submit
from engine.block_manager import BlockManager
from engine.errors import IntegrityError
from engine.flight import Flight, make_flight
from engine.integrity import check_books
from engine.outcome import Outcome, take_tokens
from engine.plan import RunnerInfo, StepPlan, StepResult
from engine.prefix import register_full_blocks
from engine.request import accept
from engine.residency import Residency
from engine.rows import Phase, RowIndex, RowTable


class Scheduler:
    """The engine's requests, from `submit` to the one end that each gets."""

    def __init__(self, info: RunnerInfo, enable_prefix_cache: bool = True) -> None:
        self.info = info
        self.rows = RowTable(info)
        self.blocks = BlockManager(info.num_blocks, info.block_size, enable_prefix_cache)
        self._residency = Residency(self.rows, self.blocks)
        self._flights: deque[Flight] = deque()
        self._ends: list[tuple[int, Finish]] = []
        self._num_arrived = 0
        self._next_step_id = 1
        self._lone_row: int | None = None  # the solo row of the last plan

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not completed."""
        return len(self._flights)

    @property
    def num_running(self) -> int:
        """Runs that hold a row."""
        return len(self.rows.row_of)

    @property
    def num_waiting(self) -> int:
        """Runs that wait for a row."""
        return len(self._residency.waiting)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start."""
        return self._residency.preemptions

    # --- messages ---

    def submit(self, submit: Submit) -> Reject | None:
        """Queue a run; returns a Reject if it can never run."""
        if submit.rid in self.rows.row_of or submit.rid in self._residency.waiting:
            return Reject(submit.rid, "invalid", "rid", f"run {submit.rid} exists already")
        request = accept(submit, self.info, self._num_arrived)
        if isinstance(request, Reject):
            return request
        self._num_arrived += 1
        self._residency.waiting.push(request)
        return None

    def abort(self, rid: int) -> None:
        """End a run with `Finish.ABORTED`, wherever it is; unknown and ended runs are passed
        over.
        """
        row = self.rows.row_of.get(rid)
        if row is not None:
            self._residency.end(row)
        elif self._residency.waiting.remove(rid) is None:
            return
        self._ends.append((rid, Finish.ABORTED))

    def pause(self, rid: int) -> None:
        """Compute nothing more for a run; it keeps its KV while there is room, and tokens in
        flight still come.
        """
        row = self.rows.row_of.get(rid)
        if row is None:
            self._residency.waiting.hold(rid)
        elif not self.rows.paused[row]:
            self._residency.displace(row)
            self.rows.paused[row] = True

    def resume(self, rid: int) -> None:
        """Undo `pause`; the run goes on at its old place in the order."""
        row = self.rows.row_of.get(rid)
        if row is None:
            self._residency.waiting.resume(rid)
        elif self.rows.paused[row]:
            self.rows.paused[row] = False
            self._residency.place(row)

    def take_ends(self) -> list[tuple[int, Finish]]:
        """Runs that ended outside a step (aborts) since the last call; each comes before any
        later event.
        """
        ends, self._ends = self._ends, []
        return ends

    # --- a step ---

    def plan(self) -> StepPlan | None:
        """Plan the next step, or None: nothing can run, or not before a step in flight is
        completed.
        """
        lone = self._find_lone_row()
        if lone != self._lone_row and self._flights:
            return None
        self._lone_row = lone
        budget = self.info.max_num_batched_tokens
        decode = self._plan_decode(budget, lone)
        chunks, replayed = self._plan_prompts(budget - len(decode), lone)
        if replayed:
            decode = np.concatenate([decode, np.array(replayed, np.int64)])
        if len(decode) == 0 and not chunks:
            return None
        flight = make_flight(self._next_step_id, self._residency, decode, chunks)
        self._next_step_id += 1
        self._flights.append(flight)
        return flight.plan

    def launched(self) -> None:
        """The last plan was launched: blocks that it fills may now be shared."""
        flight = self._flights[-1]
        for row in flight.plan.rows[flight.plan.num_decode :].tolist():
            register_full_blocks(self.rows, self.blocks, row)

    def complete(self, result: StepResult) -> Outcome:
        """Take in the result of the oldest step in flight: keep its tokens, find the runs that
        end with it.
        """
        flight = self._flights.popleft()
        if result.step_id != flight.plan.step_id or len(result.token_ids) != len(
            flight.sample_rows
        ):
            raise IntegrityError(
                f"runner returned step {result.step_id} with {len(result.token_ids)} tokens, "
                f"expected step {flight.plan.step_id} with {len(flight.sample_rows)}"
            )
        self.rows.in_flight[flight.rows] -= 1
        outcome = take_tokens(flight, result, self._residency)
        self._residency.settle()
        return outcome

    def reset(self) -> None:
        """Drop every run without a word; no step may be in flight. The prefix cache is kept."""
        if self._flights:
            raise IntegrityError(f"reset with {len(self._flights)} steps in flight")
        for row in list(self.rows.row_of.values()):
            self._residency.end(row)
        self._residency.settle()
        self._residency.waiting.clear()
        self._ends.clear()
        self._lone_row = None

    def check_integrity(self) -> None:
        """Check the books of blocks and rows. Raises IntegrityError naming the first difference."""
        check_books(self.rows, self.blocks, self._flights)

    # --- planning ---

    def _find_lone_row(self) -> int | None:
        """The solo row whose turn it is: it runs alone until it ends or pauses."""
        res, t = self._residency, self.rows
        runnable = [row for row in res.solo_rows if not t.paused[row]]
        if runnable:
            return min(runnable, key=lambda row: int(t.order[row]))
        head = res.waiting.peek()
        if head is None or not head.is_solo:
            return None
        if res.homeless and res.homeless[0][0] < head.order:
            return None
        return res.seat(head)

    def _plan_decode(self, budget: int, lone: int | None) -> RowIndex:
        """Rows that compute one token, their blocks provided, their state moved on. int64 [D]."""
        t = self.rows
        rows: RowIndex = t.decodable.nonzero()[0]
        if lone is not None:
            rows = rows[rows == lone]
        if len(rows) > budget:
            rows = np.sort(rows[np.argsort(t.order[rows])[:budget]])
        is_full = t.computed >= t.capacity  # of all rows: less work than to gather these of both
        lacking = rows[is_full[rows]]
        if len(lacking):
            self._residency.grow(lacking)
            rows = rows[t.decodable[rows] & (t.computed[rows] < t.capacity[rows])]
        t.in_flight[rows] += 1
        return rows

    def _plan_prompts(
        self, budget: int, lone: int | None
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Rows that compute a prompt chunk, and its length: rows with KV and rows let in now, in
        one order.

        And rows let in now whose prompt is all cached: they compute one output token.
        """
        res, t = self._residency, self.rows
        chunks: list[tuple[int, int]] = []
        replayed: list[int] = []
        align = t.chunk_align_tokens
        partial = res.partial.copy()
        if lone is not None:
            is_homeless = t.phase[lone] == Phase.PROMPT and not t.num_blocks[lone]
            if is_homeless and res.give_kv(lone) and t.phase[lone] == Phase.DECODE:
                t.in_flight[lone] += 1
                replayed.append(lone)
            partial = [entry for entry in res.partial if entry[1] == lone]
        can_admit = lone is None
        at = 0
        while budget >= align:
            row = None
            if can_admit and (at == len(partial) or res.next_order() < partial[at][0]):
                row = res.admit_next()
                can_admit = row is not None
            if row is None:
                if at == len(partial):
                    break
                order, row = partial[at]
                at += 1
                if not res.is_partial(order, row):  # it lost its KV, or its row, to one let in
                    continue
            t.in_flight[row] += 1
            if t.phase[row] == Phase.DECODE:
                replayed.append(row)
                budget -= 1
                continue
            computed = int(t.computed[row])
            num_new = min(int(t.length[row]), int(t.chunk_end[row])) - computed
            if num_new > budget:
                num_new = budget - (computed + budget) % align
            budget -= num_new
            chunks.append((row, num_new))
        return chunks, replayed
