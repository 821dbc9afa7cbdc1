"""Steps with prompt chunks as CUDA graphs: short ones, and of small models longer ones.

Launching a prompt step kernel by kernel takes the host some ten milliseconds, which a small model
or a short prompt does not hide. A graph takes microseconds: the first token comes that much sooner.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from engine.gpu.buffers import SharedBuffers
from engine.gpu.captured import CapturedStep
from engine.gpu.decoder import GpuDecoder
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.sampling import sample_rows
from engine.gpu.staging import IntArray, StepSlots, aligned
from engine.gpu.work import PromptWork, SampledWork
from engine.plan import StepPlan
from kernels.inputs import expand_inputs
from kernels.step_slots import fetch_inputs
from kernels.table_updates import apply_block_changes

_CACHED_BLOCKS = 64  # block table entries that a row's prefix hit may bring along
_MAX_CACHED_BLOCKS = 4096  # the same of all rows
_ROW_FIELDS = 5

Ints = TypeVar("Ints", IntArray, torch.Tensor)


class PromptGraph(CapturedStep):
    """One captured step of up to num_tokens tokens of up to num_rows prompts.

    Inputs: changes [3, C] | rows | num_computed | sample_rows | positions | sample_tokens, R each
    | cu_seqlens_q [R + 1]; each of them starts where `aligned` says.
    """

    packs_results = True

    def __init__(
        self,
        num_tokens: int,
        num_rows: int,
        kind: SampleKind,
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        block_size: int,
        slots: StepSlots,
    ) -> None:
        super().__init__(slots)
        device = tables.block_table.device
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.max_changes = max_changes(num_tokens, num_rows, block_size)
        num_inputs = num_host_ints(num_tokens, num_rows, block_size)
        self._inputs = torch.zeros(num_inputs, dtype=torch.int32, device=device)
        self._kind = kind
        self._decoder = decoder
        self._tables = tables
        self._buffers = buffers
        self._block_size = block_size
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan's block table changes find room."""
        return len(plan.block_rows) <= self.max_changes

    def fill(self, plan: StepPlan, host: IntArray) -> int:
        """Write the plan's numbers into a slot; returns the number of sampled rows."""
        num_changes, num_rows = len(plan.block_rows), len(plan.rows)
        changes, fields, cu_seqlens = self._views(host)
        changes[0, num_changes:] = -1
        changes[0, :num_changes] = plan.block_rows
        changes[1, :num_changes] = plan.block_cols
        changes[2, :num_changes] = plan.block_ids
        ends = np.cumsum(plan.num_new)
        cu_seqlens[0] = 0
        cu_seqlens[1 : num_rows + 1] = ends
        cu_seqlens[num_rows + 1 :] = ends[-1]
        sampled = np.flatnonzero(plan.sample)
        fields[:] = -1
        fields[[1, 3]] = 0
        fields[0, :num_rows] = plan.rows
        fields[1, :num_rows] = plan.num_computed
        fields[2, : len(sampled)] = plan.rows[sampled]
        fields[3, : len(sampled)] = (plan.num_computed + plan.num_new)[sampled]
        fields[4, : len(sampled)] = ends[sampled] - 1
        return len(sampled)

    def run(self, slots: StepSlots) -> None:
        """Launch the step's kernels on the current stream."""
        size, b = self.num_rows, self._buffers
        fetch_inputs(self._inputs, slots.inputs, slots.count)
        changes, fields, cu_seqlens = self._views(self._inputs)
        rows, num_computed, rows_due, positions, sample_tokens = fields
        a = b.activations.first(self.num_tokens)
        apply_block_changes(changes, self._tables.block_table)
        # Tokens past the last prompt are padding, whatever an earlier step left there.
        a.token_rows.fill_(-1)
        a.slots.fill_(-1)
        a.positions.fill_(0)
        expand_inputs(
            a.token_rows, a.positions, a.slots, self._seq_lens,
            rows, num_computed, cu_seqlens, self._tables.block_table, self._block_size,
        )  # fmt: skip
        prompts = PromptWork(0, rows, self._seq_lens, cu_seqlens)
        sampled = SampledWork(sample_tokens, rows_due, positions, b.attention.of(size))
        logits = self._decoder.packed(a, None, prompts, sampled, b.head)
        sample_rows(self._kind, logits, rows_due, positions, self._tables, b)
        slots.publish(b.out_tokens[:size], b.out_bad[:size])

    def _views(self, inputs: Ints) -> tuple[Ints, Ints, Ints]:
        """Changes [3, C], the fields with a number for each row [_ROW_FIELDS, R], and cu_seqlens_q
        [R + 1] in the inputs."""
        stride = aligned(self.num_rows)
        fields_at = 3 * self.max_changes
        ends_at = fields_at + _ROW_FIELDS * stride
        return (
            inputs[:fields_at].reshape(3, self.max_changes),
            inputs[fields_at:ends_at].reshape(_ROW_FIELDS, stride)[:, : self.num_rows],
            inputs[ends_at : ends_at + self.num_rows + 1],
        )


def max_changes(num_tokens: int, num_rows: int, block_size: int) -> int:
    """Block table entries that a captured prompt step may change."""
    cached = min(num_rows * _CACHED_BLOCKS, _MAX_CACHED_BLOCKS)
    return aligned(num_tokens // block_size + num_rows + cached)


def num_host_ints(num_tokens: int, num_rows: int, block_size: int) -> int:
    """int32 that such a step's inputs take."""
    changes = 3 * max_changes(num_tokens, num_rows, block_size)
    return changes + _ROW_FIELDS * aligned(num_rows) + num_rows + 1
