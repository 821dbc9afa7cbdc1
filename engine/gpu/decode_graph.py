"""Decode steps as CUDA graphs.

Everything a decode step does is inside: inputs from the host's memory, block table changes, layers,
LM head, sampler, the hand-over of the sampled tokens to the next step's input and to the host. Each
kernel but the first may start while the one before runs.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.gpu.buffers import SharedBuffers
from engine.gpu.captured import CapturedStep
from engine.gpu.decoder import GpuDecoder
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.sampling import sample_rows
from engine.gpu.staging import IntArray, StepSlots, aligned
from engine.gpu.work import DecodeWork
from engine.plan import StepPlan
from kernels.decode_plan import plan_decode
from kernels.step_slots import DECODE_FIELDS, begin_decode
from kernels.tiles import shared_percent


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
        slots: StepSlots,
    ) -> None:
        super().__init__(slots)
        self.size = size
        self._kind = kind
        self._decoder = decoder
        self._tables = tables
        self._buffers = buffers
        self._block_size = block_size
        self._seq_lens, self._due_rows, self._due_positions = torch.zeros(
            3, aligned(size), dtype=torch.int32, device=tables.block_table.device
        )[:, :size]

    @property
    def shared_percent(self) -> int | None:
        """See `kernels.tiles.shared_percent`; deterministic products have tiles for any number of
        rows, and leave it to the driver."""
        spec, linears = self._decoder.spec, self._decoder.linears
        if linears.deterministic:
            return None
        return shared_percent(self.size, spec.hidden_size, spec.head_dim)

    @staticmethod
    def num_host_ints(max_num_seqs: int) -> int:
        """int32 that the largest graph's inputs take."""
        return DECODE_FIELDS * max_num_seqs

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan's rows and changes find room."""
        return max(len(plan.rows), len(plan.block_rows)) <= self.size

    def fill(self, plan: StepPlan, host: IntArray) -> int:
        """Write the plan's numbers into a slot; returns how many results to fetch."""
        size, num_changes, num_rows = self.size, len(plan.block_rows), len(plan.rows)
        view = host[: DECODE_FIELDS * size].reshape(DECODE_FIELDS, size)
        view[0, num_changes:] = -1
        view[0, :num_changes] = plan.block_rows
        view[1, :num_changes] = plan.block_cols
        view[2, :num_changes] = plan.block_ids
        view[3, :num_rows] = plan.rows
        view[3, num_rows:] = -1
        view[4, :num_rows] = plan.num_computed
        view[5, num_rows:] = -1
        view[5, :num_rows] = plan.rows if plan.samples_all else np.where(plan.sample, plan.rows, -1)
        return num_rows

    def run(self, slots: StepSlots) -> None:
        """Launch the step's kernels on the current stream."""
        size, b = self.size, self._buffers
        a = b.activations.first(size)
        begin_decode(
            a.token_rows, a.positions, a.slots, self._seq_lens, self._due_rows, self._due_positions,
            slots.inputs, slots.count, self._tables.block_table, self._block_size, pdl=True,
        )  # fmt: skip
        plans = b.attention.of(size)
        for window, (plan, _) in plans.items():
            plan_decode(
                plan, self._seq_lens, self._decoder.spec.num_kv_heads, window=window, pdl=True
            )
        logits = b.head.logits[:size]
        self._decoder.decode(a, DecodeWork(a.token_rows, self._seq_lens, plans), logits)
        sample_rows(
            self._kind, logits, self._due_rows, self._due_positions, self._tables, b, pdl=True
        )
        slots.publish(b.out_tokens[:size], b.out_bad[:size], pdl=True)
