"""A runner without weights: a fixed token function over a KV cache that remembers what was written
where.

Each KV slot holds its token and a running sum over all tokens up to it, the sum being read from the
slot before it through the block table, as attention would read it. The next token depends on that
sum alone, so a wrong block table, a block reused too early or a wrong position gives wrong tokens;
with `verify` each plan is also checked in full. Each slot also remembers how its KV was computed:
by a decode row, or in which piece of a prompt; runners whose KV differs by that say so in their
`RunnerInfo`, and must then find it the same each time.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque

import numpy as np

from broker.ring.records import Sampling
from engine.config import EngineConfig, FakeModel
from engine.errors import ConfigError, PlanError
from engine.fake_checks import PlanChecker
from engine.fake_memory import FakeMemory, Words, choose, token_words
from engine.plan import IntArray, NewRow, RunnerInfo, StepPlan, StepResult


def salt_of(sampling: Sampling) -> int:
    """0 for greedy runs, else a number that differs by seed."""
    if sampling.temperature < 1e-5:
        return 0
    return (sampling.seed + 1) & 0xFFFF_FFFF_FFFF_FFFF


def expected_tokens(
    prompt_ids: list[int], count: int, vocab_size: int, sampling: Sampling | None = None
) -> list[int]:
    """The first `count` tokens that a FakeRunner gives to an undisturbed run without stop ids."""
    ids = list(prompt_ids)
    salt = np.array([salt_of(sampling or Sampling())], np.uint64)
    sums = token_words(np.array(ids, np.int32), np.arange(len(ids))).sum(
        keepdims=True, dtype=np.uint64
    )
    for _ in range(count):
        token = choose(sums, salt, vocab_size)
        sums = sums + token_words(token, np.array([len(ids)]))
        ids.append(int(token[0]))
    return ids[len(prompt_ids) :]


class FakeRunner:
    """Executes plans in the order of their launch, at launch, or at `collect` when it is
    asynchronous.
    """

    def __init__(self, info: RunnerInfo, model: FakeModel, verify: bool = False) -> None:
        self.info = info
        self.is_async = model.is_async
        self._model = model
        self._memory = FakeMemory(info)
        self._checker = PlanChecker(info, self._memory) if verify else None
        self._salt = np.zeros(info.max_num_seqs, np.uint64)
        self._bad = np.zeros(info.max_num_seqs, np.bool_)
        self._min_position: dict[int, tuple[int, frozenset[int]]] = {}
        self._launched: deque[tuple[float, StepPlan]] = deque()
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Start a step: run it now, or put it on the simulated device's queue."""
        self._act_up(plan)
        if len(self._launched) + len(self._results) >= (2 if self.is_async else 1):
            raise PlanError(f"step {plan.step_id} launched with too many steps in flight")
        if not self.is_async:
            if self._model.step_ms:
                time.sleep(self._model.step_ms / 1e3)
            self._results.append(self._execute(plan))
            return
        start = max(time.monotonic(), self._launched[-1][0] if self._launched else 0.0)
        self._launched.append((start + self._model.step_ms / 1e3, plan))

    def collect(self) -> StepResult:
        """Wait for the oldest step."""
        if self._launched:
            # Executed only now, so a plan whose arrays change after its launch gives wrong tokens.
            done_at, plan = self._launched[0]
            if self._model.step_ms:
                time.sleep(max(0.0, done_at - time.monotonic()))
            self._launched.popleft()
            self._results.append(self._execute(plan))
        if not self._results:
            raise PlanError("collect called with no step in flight")
        return self._results.popleft()

    def prepare(self) -> bool:
        """Nothing can be done ahead."""
        return False

    def close(self) -> None:
        """Nothing to free."""

    def _act_up(self, plan: StepPlan) -> None:
        """Die or hang where a new row's prompt holds the token for it."""
        model = self._model
        for new in plan.new_rows:
            prompt = new.token_ids[: new.num_prompt_tokens]
            if model.crash_token >= 0 and (prompt == model.crash_token).any():
                os.kill(os.getpid(), signal.SIGKILL)
            while model.hang_token >= 0 and (prompt == model.hang_token).any():
                time.sleep(3600)

    def _execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self._take_row(new)
        self._memory.table[plan.block_rows, plan.block_cols] = plan.block_ids
        if self._checker is not None:
            self._checker.check(plan)
        sums = self._memory.compute(plan)
        sampled = plan.sample
        positions = (plan.num_computed + plan.num_new)[sampled]
        token_ids = self._sample(plan.rows[sampled], positions, sums[sampled])
        return StepResult(plan.step_id, token_ids, self._bad[plan.rows[sampled]])

    def _take_row(self, new: NewRow) -> None:
        self._memory.take_row(new)
        row = new.row
        self._salt[row] = salt_of(new.sampling)
        prompt = new.token_ids[: new.num_prompt_tokens]
        self._bad[row] = self._model.nan_token >= 0 and (prompt == self._model.nan_token).any()
        self._min_position.pop(row, None)
        if new.min_position > len(new.token_ids) and len(new.stop_token_ids):
            self._min_position[row] = (new.min_position, frozenset(new.stop_token_ids.tolist()))

    def _sample(self, rows: IntArray, positions: IntArray, sums: Words) -> IntArray:
        vocab = self.info.vocab_size
        tokens = choose(sums, self._salt[rows], vocab)
        for i, row in enumerate(rows.tolist() if self._min_position else ()):
            min_position, stop_ids = self._min_position.get(row, (0, frozenset()))
            while positions[i] < min_position and int(tokens[i]) in stop_ids:
                tokens[i] = (tokens[i] + 1) % vocab
        self._memory.append(rows, positions, tokens)
        return tokens


def build_fake_runner(config: EngineConfig, verify: bool = False) -> FakeRunner:
    """A FakeRunner with the sizes of `config`. Raises ConfigError if it names no fake model."""
    if config.fake is None:
        raise ConfigError("fake", None, "set `fake` to use the fake model")
    model = config.fake
    block_size = config.block_size_tokens or 16
    info = RunnerInfo(
        model=config.model_name or "fake",
        architecture="fake",
        device="cpu",
        dtype="none",
        vocab_size=model.vocab_size,
        max_model_len=min(config.max_model_len or model.max_model_len, model.max_model_len),
        eos_token_ids=(model.eos_token_id,) if model.eos_token_id >= 0 else (),
        block_size=block_size,
        num_blocks=model.num_blocks,
        max_num_seqs=config.max_num_seqs or 256,
        max_num_batched_tokens=config.max_num_batched_tokens or 8192,
        load_s=0.0,
        weight_bytes=0,
        kv_bytes=0,
        chunk_align_tokens=model.chunk_align_tokens,
        replays_by_decode=model.replays_by_decode,
    )
    return FakeRunner(info, model, verify)
