"""The engine's runner on the CPU: executes a plan at once, in the calling thread."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from engine.cpu.decoder import Decoder
from engine.cpu.head import Embedding, LmHead
from engine.cpu.kv_cache import KvCache
from engine.cpu.sampler import sample
from engine.cpu.step_inputs import build_step_inputs
from engine.cpu.tables import RowTables
from engine.plan import RunnerInfo, StepPlan, StepResult


class CpuRunner:
    """`Runner` over a decoder, its cache and the row tables; made by `engine.build`.

    Synchronous: `launch` does the work and `collect` hands out what it left.
    """

    is_async = False

    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        embedding: Embedding,
        head: LmHead,
        cache: KvCache,
        windows: tuple[int, ...],
        num_kv_heads: int,
    ) -> None:
        self.info = info
        self._decoder = decoder
        self._embedding = embedding
        self._head = head
        self._cache = cache
        self._windows = tuple(sorted(set(windows)))
        self._num_kv_heads = num_kv_heads
        self._tables = RowTables(
            info.max_num_seqs, info.max_model_len, info.block_size, cache.pad_block
        )
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Run one step; sampled tokens enter the token table and wait for `collect`."""
        with torch.inference_mode():
            self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        """The oldest step's tokens."""
        return self._results.popleft()

    def prepare(self) -> bool:
        """Nothing can be done ahead."""
        return False

    def close(self) -> None:
        """Nothing to free: memory goes with the object."""
        self._results.clear()

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step up to its logits, float32 [S, V], without sampling. For tests."""
        with torch.inference_mode():
            return self._forward(plan)

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
        fresh_blocks = self._tables.apply(plan)
        if len(fresh_blocks):
            self._cache.clear_blocks(torch.from_numpy(fresh_blocks))
        if not len(plan.rows):
            return torch.empty(0, self.info.vocab_size)
        step = build_step_inputs(plan, self._tables, self._cache, self._windows, self._num_kv_heads)
        hidden = self._decoder.forward(self._embedding(step.token_ids), step)
        if not len(hidden):
            return torch.empty(0, self.info.vocab_size)
        return self._head(hidden)
