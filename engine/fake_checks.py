"""Whether a plan fits what the fake runner remembers: checked before each step with `verify`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.errors import PlanError
from engine.fake_memory import BY_DECODE, FakeMemory, piece_ends, token_words
from engine.plan import RunnerInfo, StepPlan


class PlanChecker:
    """Checks plans against one memory, which has taken the plan's new rows and blocks."""

    def __init__(self, info: RunnerInfo, memory: FakeMemory) -> None:
        self._info = info
        self._memory = memory

    def check(self, plan: StepPlan) -> None:
        """Raise PlanError where a plan contradicts the rows, the tables or the cache."""
        memory, rows, done = self._memory, plan.rows, plan.num_computed + plan.num_new
        d = plan.num_decode
        changes = set(zip(plan.block_rows.tolist(), plan.block_cols.tolist(), strict=True))
        checks = {
            "a row is named twice": len(set(rows.tolist())) == len(rows),
            "a row computes nothing": bool((plan.num_new > 0).all()),
            "a decode row computes other than one token": bool((plan.num_new[:d] == 1).all()),
            "a decode row computes a token without need to": bool(
                plan.sample[:d].all() or self._info.replays_by_decode
            ),
            "a row computes past its tokens": bool((done <= memory.length[rows]).all()),
            "sample differs from 'the chunk ends the row'": bool(
                (plan.sample == (done == memory.length[rows])).all()
            ),
            "a block table entry is set twice": len(changes) == len(plan.block_rows),
            "the step is over its token budget": int(plan.num_new.sum())
            <= self._info.max_num_batched_tokens,
        }
        for problem, is_fine in checks.items():
            if not is_fine:
                raise PlanError(f"step {plan.step_id}: {problem}")
        written: set[int] = set()
        for row, start, end in zip(
            rows.tolist(), plan.num_computed.tolist(), done.tolist(), strict=True
        ):
            self._check_row(plan.step_id, row, start, end, written)

    def _check_row(self, step_id: int, row: int, start: int, end: int, written: set[int]) -> None:
        """The row's context is what its tokens say; the slots it writes belong to nobody else in
        the step.
        """
        memory = self._memory
        used = memory.table[row, : -(-end // self._info.block_size)]
        if ((used < 0) | (used >= self._info.num_blocks)).any():
            raise PlanError(
                f"step {step_id}: row {row} computes to {end} with blocks {used.tolist()}"
            )
        positions = np.arange(end)
        slots = memory.slots(np.full(end, row, np.int32), positions)
        if (memory.kv_token[slots[:start]] != memory.tokens[row, :start]).any():
            raise PlanError(f"step {step_id}: row {row} reads KV of other tokens below {start}")
        words = token_words(memory.tokens[row, :start], positions[:start])
        sums = np.cumsum(words, dtype=np.uint64)
        if (memory.kv_sum[slots[:start]] != sums).any():
            raise PlanError(f"step {step_id}: row {row} reads KV of another prefix below {start}")
        if self._info.replays_by_decode:
            self._check_pieces(step_id, row, slots[:start], end)
        new = set(slots[start:].tolist())
        if new & written:
            raise PlanError(f"step {step_id}: row {row} writes slots that another row writes")
        written |= new

    def _check_pieces(self, step_id: int, row: int, slots: npt.NDArray[np.int64], end: int) -> None:
        """The row's context (slots int64 [start]) was computed as an undisturbed run does it, and
        so is what it computes now, up to `end`.
        """
        memory = self._memory
        start, num_prompt = len(slots), int(memory.num_prompt[row])
        align = self._info.chunk_align_tokens
        positions = np.arange(start)
        expected = piece_ends(positions, align, num_prompt)
        expected[positions >= num_prompt] = BY_DECODE
        if (memory.kv_piece_end[slots] != expected).any():
            raise PlanError(f"step {step_id}: row {row} reads KV made another way below {start}")
        is_piece = start % align == 0 and (end % align == 0 or end == num_prompt)
        if (end > num_prompt and end - start > 1) or (start < num_prompt and not is_piece):
            raise PlanError(f"step {step_id}: row {row} computes {start} to {end} in one piece")
