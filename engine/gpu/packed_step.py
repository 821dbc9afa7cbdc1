"""Steps with prompt chunks: packed on the host, sent in one piece, launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.gpu.activations import Activations
from engine.gpu.buffers import SharedBuffers
from engine.gpu.decoder import GpuDecoder
from engine.gpu.memory import StepLimits
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.sampling import sample_rows
from engine.gpu.staging import StepUpload
from engine.gpu.warm_ups import padding_steps
from engine.gpu.work import DecodeWork, PromptWork, SampledWork
from engine.plan import StepPlan
from kernels.decode_plan import plan_decode
from kernels.inputs import expand_inputs
from kernels.table_updates import apply_block_changes


def upload_capacity(limits: StepLimits) -> int:
    """int32 that the largest packed step sends."""
    rows = limits.max_num_seqs
    changes = limits.max_num_batched_tokens // limits.block_size + 2 * rows
    cached = rows * limits.blocks_per_seq  # a prefix hit brings a row's whole table at once
    return 3 * (changes + cached) + 6 * rows + 64


class PackedSteps:
    """Runs plans of any mix on the current stream."""

    def __init__(
        self, decoder: GpuDecoder, tables: RowTables, buffers: SharedBuffers, limits: StepLimits
    ) -> None:
        self._decoder = decoder
        self._tables = tables
        self._buffers = buffers
        self._limits = limits
        device = tables.block_table.device
        self._upload = StepUpload(upload_capacity(limits), device)
        self._seq_lens = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

    def run(self, plan: StepPlan, kind: SampleKind) -> int:
        """Launch the step; returns the number of sampled tokens now due in the out buffers."""
        num_new = plan.num_new.astype(np.int32)
        cu_seqlens = np.zeros(len(num_new) + 1, np.int32)
        np.cumsum(num_new, out=cu_seqlens[1:])
        sampled = np.flatnonzero(plan.sample)
        sends = (
            np.concatenate([plan.block_rows, plan.block_cols, plan.block_ids]),
            plan.rows,
            plan.num_computed,
            cu_seqlens,
            cu_seqlens[plan.num_decode :] - cu_seqlens[plan.num_decode],
            cu_seqlens[1:][sampled] - 1,
            plan.rows[sampled],
            np.where(plan.rows < 0, 0, plan.num_computed + num_new)[sampled],
        )
        changes, rows, num_computed, cu, cu_prompt, sample_tokens, rows_due, positions = (
            self._upload.send(sends)
        )
        apply_block_changes(changes.view(3, -1), self._tables.block_table)
        a = self._buffers.activations.first(int(cu_seqlens[-1]))
        seq_lens = self._seq_lens[: len(rows)]
        expand_inputs(
            a.token_rows, a.positions, a.slots, seq_lens,
            rows, num_computed, cu, self._tables.block_table, self._limits.block_size,
        )  # fmt: skip
        num_sampled = len(sampled)
        plans = self._buffers.attention.of(num_sampled)
        due = SampledWork(sample_tokens, rows_due, positions, plans)
        logits = self._layers(plan, a, rows, seq_lens, cu_prompt, due)
        if num_sampled:
            sample_rows(kind, logits, rows_due, positions, self._tables, self._buffers)
        return num_sampled

    def warm_ups(self) -> Iterator[None]:
        """Compile the kernels of such steps piece by piece, each by a step of padding: nothing is
        read or written for it. After the last, no mix of rows needs another."""
        decoder, dtype = self._decoder, self._buffers.activations.hidden.dtype
        for kind, plan in padding_steps(decoder.spec, dtype, decoder.linears, self._limits):
            self.run(plan, kind)
            yield

    def _layers(
        self,
        plan: StepPlan,
        a: Activations,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_prompt: torch.Tensor,
        sampled: SampledWork,
    ) -> torch.Tensor:
        num_decode = plan.num_decode
        decode = prompts = None
        if num_decode:
            lens = seq_lens[:num_decode]
            plans = self._buffers.attention.of(num_decode)
            for window, (work_list, _) in plans.items():
                plan_decode(work_list, lens, self._decoder.spec.num_kv_heads, window=window)
            decode = DecodeWork(rows[:num_decode], lens, plans)
        if num_decode < len(rows):
            prompts = PromptWork(num_decode, rows[num_decode:], seq_lens[num_decode:], cu_prompt)
        return self._decoder.packed(a, decode, prompts, sampled, self._buffers.head)
