"""Decode steps as CUDA graphs.

Everything a decode step does is inside: block table changes, inputs, layers, LM head, sampler and
the hand-over of the sampled tokens to the next step's input.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.gpu.buffers import SharedBuffers
from engine.gpu.captured import CapturedStep
from engine.gpu.decoder import DecodeWork, GpuDecoder
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.sampling import sample_rows
from engine.gpu.staging import IntArray
from engine.plan import StepPlan
from kernels.decode_plan import plan_decode
from kernels.inputs import expand_inputs
from kernels.table_updates import apply_block_changes

_FIELDS = 7  # changes [3] | rows | num_computed | rows that sample | position of the sample


class DecodeGraph(CapturedStep):
    """One captured step of `size` rows, of which a plan may fill fewer; the rest is padding.

    A row that does not sample (its next token is known already) leaves its place in the out buffers
    unwritten: results are at the row's index, not packed.
    """

    packs_results = False

    def __init__(
        self,
        size: int,
        kind: SampleKind,
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        block_size: int,
    ) -> None:
        device = tables.block_table.device
        super().__init__(_FIELDS * size, device)
        self.size = size
        self._kind = kind
        self._decoder = decoder
        self._tables = tables
        self._buffers = buffers
        self._block_size = block_size
        self._seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.arange(size + 1, dtype=torch.int32, device=device)

    @staticmethod
    def num_host_ints(max_num_seqs: int) -> int:
        """int32 that the largest graph's inputs take."""
        return _FIELDS * max_num_seqs

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan's rows and changes find room."""
        return max(len(plan.rows), len(plan.block_rows)) <= self.size

    def fill(self, plan: StepPlan, host: IntArray) -> int:
        """Write the plan's numbers into a pinned array; returns how many results to fetch."""
        size, num_changes, num_rows = self.size, len(plan.block_rows), len(plan.rows)
        view = host[: _FIELDS * size].reshape(_FIELDS, size)
        view[0, num_changes:] = -1
        view[0, :num_changes] = plan.block_rows
        view[1, :num_changes] = plan.block_cols
        view[2, :num_changes] = plan.block_ids
        view[3, :num_rows] = plan.rows
        view[3, num_rows:] = -1
        view[4, :num_rows] = plan.num_computed
        view[4, num_rows:] = 0
        view[5] = -1
        view[5, :num_rows][plan.sample] = plan.rows[plan.sample]
        np.add(view[4], 1, out=view[6])
        return num_rows

    def run(self) -> None:
        """Launch the step's kernels on the current stream."""
        size, b = self.size, self._buffers
        fields = self.inputs.view(_FIELDS, size)
        changes = fields[:3]
        rows, num_computed, rows_due, positions = fields[3:]
        a = b.activations.first(size)
        apply_block_changes(changes, self._tables.block_table)
        expand_inputs(
            a.token_rows, a.positions, a.slots, self._seq_lens,
            rows, num_computed, self._cu_seqlens, self._tables.block_table, self._block_size,
        )  # fmt: skip
        plans = b.attention.of(size)
        for window, (plan, _) in plans.items():
            plan_decode(plan, self._seq_lens, self._decoder.spec.num_kv_heads, window=window)
        logits = b.head.logits[:size]
        self._decoder.decode(a, DecodeWork(rows, self._seq_lens, plans), logits)
        sample_rows(self._kind, logits, rows_due, positions, self._tables, b)
