"""The engine's runner on the CPU: executes a plan at once, in the calling thread."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from engine.cpu.huge_pages import HugePages
from engine.cpu.model import CpuModel
from engine.cpu.pace import ThreadPacer
from engine.cpu.sampler import sample
from engine.cpu.step_inputs import build_step_inputs
from engine.cpu.tables import RowTables
from engine.plan import RunnerInfo, StepPlan, StepResult


def _unchecked() -> np.errstate:
    """NumPy says nothing of numbers that are not finite: the sampler reports their row."""
    return np.errstate(all="ignore")


class CpuRunner:
    """`Runner` over a model and the row tables; made by `engine.build`.

    Synchronous: `launch` does the work and `collect` hands out what it left.
    """

    is_async = False

    def __init__(self, info: RunnerInfo, model: CpuModel, pacer: ThreadPacer) -> None:
        self.info = info
        self.model = model
        self._pacer = pacer
        self._windows = tuple(sorted(set(model.spec.windows)))
        self._tables = RowTables(
            info.max_num_seqs, info.max_model_len, info.block_size, model.cache.pad_block
        )
        self._huge_pages = HugePages()
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Run one step; sampled tokens enter the token table and wait for `collect`."""
        num_tokens = int(plan.num_new.sum())
        self._set_threads(self._pacer.choose(num_tokens))
        start = time.perf_counter()
        with torch.inference_mode(), _unchecked():
            self._results.append(self._run(plan))
        self._pacer.record(num_tokens, time.perf_counter() - start)

    def collect(self) -> StepResult:
        """The oldest step's tokens."""
        return self._results.popleft()

    def prepare(self) -> bool:
        """Move a piece of memory onto huge pages."""
        return self._huge_pages.move_some()

    def close(self) -> None:
        """Nothing to free: memory goes with the object."""
        self._results.clear()

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step up to its logits, float32 [S, V], without sampling. For tests."""
        with torch.inference_mode(), _unchecked():
            return self._forward(plan)

    def _set_threads(self, num_threads: int) -> None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def _run(self, plan: StepPlan) -> StepResult:
        logits = self._forward(plan)
        rows = plan.rows[plan.sample]
        if not len(rows):
            return StepResult(plan.step_id, np.zeros(0, np.int32), np.zeros(0, np.bool_))
        positions = (plan.num_computed + plan.num_new)[plan.sample]
        tokens, bad = sample(logits, rows, positions, self._tables)
        self._tables.tokens[rows, positions] = tokens
        return StepResult(plan.step_id, tokens, bad)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        model = self.model
        fresh_blocks = self._tables.apply(plan)
        if len(fresh_blocks):
            model.cache.clear_blocks(torch.from_numpy(fresh_blocks))
        if not len(plan.rows):
            return torch.empty(0, self.info.vocab_size)
        kv_heads = model.spec.num_kv_heads
        step = build_step_inputs(plan, self._tables, model.cache, self._windows, kv_heads)
        model.contexts.enter(plan, step.decode)
        hidden = model.decoder.forward(model.embedding(step.token_ids), step)
        if not len(hidden):
            return torch.empty(0, self.info.vocab_size)
        return model.head(hidden)
