"""The GPU runner: plans in, tokens out, one step behind.

`launch` only enqueues: rows that are new, then a graph, which reads its inputs from pinned memory
and writes its results there, or the packed step, with one small upload before and the results
behind. `collect` waits for the oldest of these: for the stamp that its last kernel writes beside
the results. An event behind each step would cost the host a third of a launch, and say no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import PlanError
from engine.gpu.buffers import SharedBuffers
from engine.gpu.decoder import GpuDecoder
from engine.gpu.graph_cache import GraphCache
from engine.gpu.memory import StepLimits
from engine.gpu.packed_step import PackedSteps
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.sampling import sample_rows
from engine.gpu.staging import NUM_SLOTS
from engine.plan import RunnerInfo, StepPlan, StepResult


class _Flight(NamedTuple):
    """A launched step: where its tokens will be on the host."""

    step_id: int
    number: int  # of the step in the slots
    num_results: int
    picked: npt.NDArray[np.int64] | None  # which of the results are tokens; None: all


class GpuRunner:
    """Implements `engine.plan.Runner` on one CUDA device."""

    is_async = True

    def __init__(
        self,
        info: RunnerInfo,
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        graphs: GraphCache,
        limits: StepLimits,
    ) -> None:
        self.info = info
        self._tables = tables
        self._buffers = buffers
        self._graphs = graphs
        self._packed = PackedSteps(decoder, tables, buffers, limits)
        self._slots = graphs.slots
        self._warm_ups = self._compile_ahead()
        self._flights: deque[_Flight] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step. Raises PlanError when two are in flight already."""
        if len(self._flights) > NUM_SLOTS - 2:
            raise PlanError(f"step {plan.step_id} launched with {len(self._flights)} in flight")
        self._tables.take_over(plan.new_rows)
        sampled = plan.rows if plan.samples_all else plan.rows[plan.sample]
        kind = SampleKind(self._tables.kinds[sampled].max(initial=0))
        graph = self._graphs.find(plan, kind)
        picked = None
        host = self._slots.next_inputs()
        if graph is not None:
            num_results = graph.fill(plan, host)
            graph.replay()
            if not (graph.packs_results or plan.samples_all or plan.sample.all()):
                picked = np.flatnonzero(plan.sample)
        else:
            num_results = self._packed.run(plan, kind)
            out = self._buffers
            self._slots.publish(out.out_tokens[:num_results], out.out_bad[:num_results])
        number = self._slots.launched()
        self._flights.append(_Flight(plan.step_id, number, num_results, picked))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what the device failed with, and
        IntegrityError where the device never ran that step."""
        flight = self._flights.popleft()
        self._slots.wait(flight.number)
        tokens, bad = self._slots.results(flight.number)
        which = slice(flight.num_results) if flight.picked is None else flight.picked
        return StepResult(flight.step_id, tokens[which].copy(), bad[which].astype(np.bool_))

    def last_logits(self, index: int) -> torch.Tensor:
        """Logits float32 [V] of the index-th sampled row of the last step, penalties applied; for
        checks.

        A view that the next step overwrites.
        """
        return self._buffers.head.logits[index]

    def prepare(self) -> bool:
        """One piece of work for an idle moment: compile, or capture a graph; False if none is
        left."""
        if self._flights:
            return False
        for _ in self._warm_ups:
            return True
        return self._graphs.capture_one()

    def _compile_ahead(self) -> Iterator[None]:
        """Compile kernels that no graph has, a piece at a time: a request waits for one at most."""
        yield from self._packed.warm_ups()
        self._tables.warm_up()
        out = self._buffers
        self._graphs.spare.publish(out.out_tokens[:0], out.out_bad[:0])
        yield
        # Graphs with filters or penalties are captured when the first such request comes, which
        # shall wait for no compilation then.
        logits = out.head.logits
        padding = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
        for kind in (SampleKind.FILTERED, SampleKind.PENALISED):
            for num_rows in (1, len(logits)):
                rows = padding[:num_rows]
                sample_rows(kind, logits[:num_rows], rows, rows, self._tables, out, pdl=True)
                yield

    def close(self) -> None:
        """Wait for the device; memory goes with the objects."""
        torch.cuda.synchronize()
