"""Decode steps as CUDA graphs, one per batch bucket and sampler variant.

Everything a decode step does is inside: block table changes, inputs, layers, LM head, sampler and
the hand-over of the sampled tokens to the next step's input. The host fills one small buffer and
launches. Graphs are captured when first needed, after one eager run has compiled the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.gpu.activations import Activations, HeadBuffers
from engine.gpu.attention_plans import AttentionPlans
from engine.gpu.decoder import DecodeWork, GpuDecoder
from engine.gpu.row_tables import RowTables
from engine.gpu.staging import IntArray
from engine.plan import StepPlan
from kernels.decode_plan import plan_decode
from kernels.inputs import expand_inputs
from kernels.sampler import SamplerWorkspace, sample
from kernels.table_updates import apply_block_changes

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that graphs are captured for; the last one is max_num_seqs itself."""
    return (*(b for b in BUCKETS if b < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """What all graphs and the packed step use, one after the other on one stream."""

    activations: Activations
    head: HeadBuffers
    sampler: SamplerWorkspace
    attention: AttentionPlans
    out_tokens: torch.Tensor  # int32 [max rows]
    out_bad: torch.Tensor  # int8 [max rows]


class DecodeGraph:
    """One captured step of `size` rows, of which the plan may fill fewer; the rest is padding."""

    def __init__(
        self,
        size: int,
        has_filters: bool,
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        block_size: int,
        pool: Any,
    ) -> None:
        self.size = size
        self._has_filters = has_filters
        self._decoder = decoder
        self._tables = tables
        self._buffers = buffers
        self._block_size = block_size
        device = tables.block_table.device
        # changes [3, size] | rows | num_computed | position of the sampled token
        self._inputs = torch.zeros(6 * size, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._inputs[: 4 * size].fill_(-1)
        self._graph = torch.cuda.CUDAGraph()
        self._capture(pool)

    def fill(self, plan: StepPlan, host: IntArray) -> int:
        """Write the plan's numbers into a pinned array; returns how many int32 it takes."""
        size, num_changes, num_rows = self.size, len(plan.block_rows), len(plan.rows)
        view = host[: 6 * size].reshape(6, size)
        view[0, num_changes:] = -1
        view[0, :num_changes] = plan.block_rows
        view[1, :num_changes] = plan.block_cols
        view[2, :num_changes] = plan.block_ids
        view[3, :num_rows] = plan.rows
        view[3, num_rows:] = -1
        view[4, :num_rows] = plan.num_computed
        view[4, num_rows:] = 0
        np.add(view[4], 1, out=view[5])
        return 6 * size

    def replay(self, host: torch.Tensor) -> None:
        """Copy the filled pinned buffer to the device and launch, on the current stream."""
        self._inputs.copy_(host[: len(self._inputs)], non_blocking=True)
        self._graph.replay()

    def _capture(self, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()  # compiles what is new; padding rows touch nothing
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._run()

    def _run(self) -> None:
        size, b = self.size, self._buffers
        fields = self._inputs.view(6, size)
        changes, rows, num_computed, positions = fields[:3], fields[3], fields[4], fields[5]
        a = b.activations.first(size)
        apply_block_changes(changes, self._tables.block_table)
        expand_inputs(
            a.token_rows, a.positions, a.slots, self._seq_lens,
            rows, num_computed, self._cu_seqlens, self._tables.block_table, self._block_size,
        )  # fmt: skip
        plans = b.attention.plans
        for window, (plan, _) in plans.items():
            plan_decode(plan, self._seq_lens, self._decoder.spec.num_kv_heads, window=window)
        logits = b.head.logits[:size]
        self._decoder.decode(a, DecodeWork(rows, self._seq_lens, plans), logits)
        sample(
            b.out_tokens[:size], b.out_bad[:size], logits, rows, positions,
            self._tables.sampling, self._tables.token_table, b.sampler,
            has_filters=self._has_filters,
        )  # fmt: skip


class GraphCache:
    """Graphs by (bucket, has_filters), captured on demand into one memory pool."""

    def __init__(
        self,
        sizes: Sequence[int],
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        block_size: int,
    ) -> None:
        self.sizes = tuple(sizes)
        self._parts = (decoder, tables, buffers, block_size)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._bucket_of = np.searchsorted(np.array(self.sizes), np.arange(self.sizes[-1] + 1))

    def get(self, num_rows: int, has_filters: bool) -> DecodeGraph:
        """The graph for this many rows, captured now if it is the first time."""
        key = (self.sizes[int(self._bucket_of[num_rows])], has_filters)
        graph = self._graphs.get(key)
        if graph is None:
            decoder, tables, buffers, block_size = self._parts
            graph = DecodeGraph(*key, decoder, tables, buffers, block_size, self._pool)
            self._graphs[key] = graph
        return graph

    def missing(self) -> list[int]:
        """Buckets without an unfiltered graph, largest first."""
        return [size for size in reversed(self.sizes) if (size, False) not in self._graphs]

    @property
    def num_captured(self) -> int:
        """Graphs held now."""
        return len(self._graphs)
