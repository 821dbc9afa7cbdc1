"""Row tables of the CPU runner: token ids, block tables and sampling settings, indexed by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.cpu.penalties import RowPenalties
from engine.plan import IntArray, NewRow, StepPlan

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class RowTables:
    """What the runner remembers about each row between steps.

    tokens int32 [rows, positions]; blocks int64 [rows, columns]; the rest [rows]. stop_ids holds
    the ids that may not be sampled below `min_position`, by row. penalties has the rows whose run
    asks for any.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, pad: int) -> None:
        columns = -(-max_model_len // block_size)
        self.block_size = block_size
        self.tokens: IntArray = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.blocks: LongArray = np.full((max_num_seqs, columns), pad, np.int64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)
        self.temperature: FloatArray = np.zeros(max_num_seqs, np.float32)
        self.top_p: FloatArray = np.ones(max_num_seqs, np.float32)
        self.min_p: FloatArray = np.zeros(max_num_seqs, np.float32)
        self.top_k: IntArray = np.zeros(max_num_seqs, np.int32)
        self.min_position: IntArray = np.zeros(max_num_seqs, np.int32)
        self.stop_ids: list[IntArray] = [np.zeros(0, np.int32)] * max_num_seqs
        self.penalties: dict[int, RowPenalties] = {}
        self._pad = pad

    def apply(self, plan: StepPlan) -> LongArray:
        """Take over new rows and block changes. Returns ids of blocks that get a new owner."""
        for new in plan.new_rows:
            self._take_over(new)
        if not len(plan.block_rows):
            return np.zeros(0, np.int64)
        ids = plan.block_ids.astype(np.int64)
        self.blocks[plan.block_rows, plan.block_cols] = ids
        # A block whose tokens are all computed came from the prefix cache: its content is wanted.
        # So may be the blocks of rows that compute nothing in this step.
        computed = np.full(len(self.tokens), np.iinfo(np.int64).max)
        computed[plan.rows] = plan.num_computed
        is_fresh = (plan.block_cols + 1) * self.block_size > computed[plan.block_rows]
        return ids[is_fresh]

    def _take_over(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self.blocks[row] = self._pad
        self.seed[row] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.min_position[row] = new.min_position
        self.stop_ids[row] = new.stop_token_ids
        if sampling.has_penalties:
            self.penalties[row] = RowPenalties(sampling, new.num_prompt_tokens)
        else:
            self.penalties.pop(row, None)
