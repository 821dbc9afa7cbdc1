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
import numpy.typing as npt

from broker.ring.records import Sampling
from engine.config import EngineConfig, FakeModel
from engine.errors import ConfigError, PlanError
from engine.plan import IntArray, NewRow, RunnerInfo, StepPlan, StepResult

Words = npt.NDArray[np.uint64]

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_BY_DECODE = -1
_U1, _U27, _U30, _U31 = (np.uint64(n) for n in (1, 27, 30, 31))


def mix(x: Words) -> Words:
    """Scramble 64-bit words (uint64 [N]), the finalizer of splitmix64."""
    x = (x ^ (x >> _U30)) * _MIX_1
    x = (x ^ (x >> _U27)) * _MIX_2
    return x ^ (x >> _U31)


def token_words(token_ids: IntArray, positions: npt.NDArray[np.int64]) -> Words:
    """What each token at its position adds to the running sum. uint64 [N]."""
    return mix(token_ids.astype(np.uint64) * _STRIDE + positions.astype(np.uint64) + _U1)


def choose(sums: Words, salts: Words, vocab_size: int) -> IntArray:
    """Next token after each running sum; salts (uint64 [N]) stand for the seeds of sampled runs.
    int32 [N].
    """
    return (mix(sums + salts * _STRIDE) % np.uint64(vocab_size)).astype(np.int32)


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
        self._verify = verify
        num_rows = info.max_num_seqs
        num_cols = -(-info.max_model_len // info.block_size)
        self._tokens = np.zeros((num_rows, info.max_model_len + 1), np.int32)
        self._length = np.zeros(num_rows, np.int32)
        self._table = np.full((num_rows, num_cols), -1, np.int32)
        self._salt = np.zeros(num_rows, np.uint64)
        self._bad = np.zeros(num_rows, np.bool_)
        self._min_position: dict[int, tuple[int, frozenset[int]]] = {}
        self._kv_token = np.full(info.num_blocks * info.block_size, -1, np.int32)
        self._kv_sum = np.zeros(info.num_blocks * info.block_size, np.uint64)
        self._kv_piece_end = np.zeros(info.num_blocks * info.block_size, np.int32)
        self._num_prompt = np.zeros(num_rows, np.int32)
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
        self._table[plan.block_rows, plan.block_cols] = plan.block_ids
        if self._verify:
            self._check(plan)
        rows = plan.rows
        sums = np.zeros(len(rows), np.uint64)
        d = plan.num_decode
        if d:
            sums[:d] = self._decode(rows[:d], plan.num_computed[:d])
        for i in range(d, len(rows)):
            start = int(plan.num_computed[i])
            sums[i] = self._prompt_chunk(int(rows[i]), start, start + int(plan.num_new[i]))
        sampled = plan.sample
        positions = (plan.num_computed + plan.num_new)[sampled]
        token_ids = self._sample(rows[sampled], positions, sums[sampled])
        return StepResult(plan.step_id, token_ids, self._bad[rows[sampled]])

    def _take_row(self, new: NewRow) -> None:
        row, length = new.row, len(new.token_ids)
        self._tokens[row, :length] = new.token_ids
        self._length[row] = length
        self._table[row] = -1
        self._salt[row] = salt_of(new.sampling)
        self._num_prompt[row] = new.num_prompt_tokens
        prompt = new.token_ids[: new.num_prompt_tokens]
        self._bad[row] = self._model.nan_token >= 0 and (prompt == self._model.nan_token).any()
        self._min_position.pop(row, None)
        if new.min_position > length and len(new.stop_token_ids):
            self._min_position[row] = (new.min_position, frozenset(new.stop_token_ids.tolist()))

    def _slots(self, rows: IntArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size = self.info.block_size
        blocks = self._table[rows, positions // size].astype(np.int64)
        return blocks * size + positions % size

    def _decode(self, rows: IntArray, computed: IntArray) -> Words:
        positions = computed.astype(np.int64)
        before = self._kv_sum[self._slots(rows, np.maximum(positions - 1, 0))]
        before[positions == 0] = 0
        tokens = self._tokens[rows, positions]
        sums = before + token_words(tokens, positions)
        slots = self._slots(rows, positions)
        self._kv_token[slots] = tokens
        self._kv_sum[slots] = sums
        self._kv_piece_end[slots] = _BY_DECODE
        return sums

    def _prompt_chunk(self, row: int, start: int, end: int) -> np.uint64:
        positions = np.arange(max(start - 1, 0), end)
        slots = self._slots(np.full(len(positions), row, np.int32), positions)
        words = token_words(self._tokens[row, positions], positions)
        if start:
            words[0] = self._kv_sum[slots[0]]
        sums = np.cumsum(words, dtype=np.uint64)
        self._kv_token[slots] = self._tokens[row, positions]
        self._kv_sum[slots] = sums
        ends = _piece_ends(positions, self.info.chunk_align_tokens, end)
        self._kv_piece_end[slots[-(end - start) :]] = ends[-(end - start) :]
        return np.uint64(sums[-1])

    def _sample(self, rows: IntArray, positions: IntArray, sums: Words) -> IntArray:
        vocab = self.info.vocab_size
        tokens = choose(sums, self._salt[rows], vocab)
        for i, row in enumerate(rows.tolist() if self._min_position else ()):
            min_position, stop_ids = self._min_position.get(row, (0, frozenset()))
            while positions[i] < min_position and int(tokens[i]) in stop_ids:
                tokens[i] = (tokens[i] + 1) % vocab
        self._tokens[rows, positions] = tokens
        self._length[rows] = positions + 1
        return tokens

    def _check(self, plan: StepPlan) -> None:
        """Raise PlanError where a plan contradicts the rows, the tables or the cache."""
        rows, done = plan.rows, plan.num_computed + plan.num_new
        d = plan.num_decode
        changes = set(zip(plan.block_rows.tolist(), plan.block_cols.tolist(), strict=True))
        checks = {
            "a row is named twice": len(set(rows.tolist())) == len(rows),
            "a row computes nothing": bool((plan.num_new > 0).all()),
            "a decode row computes other than one token": bool((plan.num_new[:d] == 1).all()),
            "a decode row computes a token without need to": bool(
                plan.sample[:d].all() or self.info.replays_by_decode
            ),
            "a row computes past its tokens": bool((done <= self._length[rows]).all()),
            "sample differs from 'the chunk ends the row'": bool(
                (plan.sample == (done == self._length[rows])).all()
            ),
            "a block table entry is set twice": len(changes) == len(plan.block_rows),
            "the step is over its token budget": int(plan.num_new.sum())
            <= self.info.max_num_batched_tokens,
        }
        for problem, is_fine in checks.items():
            if not is_fine:
                raise PlanError(f"step {plan.step_id}: {problem}")
        written: set[int] = set()
        for row, start, end in zip(
            rows.tolist(), plan.num_computed.tolist(), done.tolist(), strict=True
        ):
            self._check_row(plan.step_id, row, start, end, written)

    def _check_row(self, step_id: int, row: int, start: int, end: int, written: set[int]) -> None:
        """The row's context is what its tokens say; the slots it writes belong to nobody else in
        the step.
        """
        used = self._table[row, : -(-end // self.info.block_size)]
        if ((used < 0) | (used >= self.info.num_blocks)).any():
            raise PlanError(
                f"step {step_id}: row {row} computes to {end} with blocks {used.tolist()}"
            )
        positions = np.arange(end)
        slots = self._slots(np.full(end, row, np.int32), positions)
        if (self._kv_token[slots[:start]] != self._tokens[row, :start]).any():
            raise PlanError(f"step {step_id}: row {row} reads KV of other tokens below {start}")
        sums = np.cumsum(token_words(self._tokens[row, :start], positions[:start]), dtype=np.uint64)
        if (self._kv_sum[slots[:start]] != sums).any():
            raise PlanError(f"step {step_id}: row {row} reads KV of another prefix below {start}")
        if self.info.replays_by_decode:
            self._check_pieces(step_id, row, slots[:start], end)
        new = set(slots[start:].tolist())
        if new & written:
            raise PlanError(f"step {step_id}: row {row} writes slots that another row writes")
        written |= new

    def _check_pieces(self, step_id: int, row: int, slots: npt.NDArray[np.int64], end: int) -> None:
        """The row's context (slots int64 [start]) was computed as an undisturbed run does it, and
        so is what it computes now, up to `end`.
        """
        start, num_prompt = len(slots), int(self._num_prompt[row])
        align = self.info.chunk_align_tokens
        positions = np.arange(start)
        expected = _piece_ends(positions, align, num_prompt)
        expected[positions >= num_prompt] = _BY_DECODE
        if (self._kv_piece_end[slots] != expected).any():
            raise PlanError(f"step {step_id}: row {row} reads KV made another way below {start}")
        is_piece = start % align == 0 and (end % align == 0 or end == num_prompt)
        if (end > num_prompt and end - start > 1) or (start < num_prompt and not is_piece):
            raise PlanError(f"step {step_id}: row {row} computes {start} to {end} in one piece")


def _piece_ends(
    positions: npt.NDArray[np.int64], align: int, num_prompt: int
) -> npt.NDArray[np.int64]:
    """Where the piece of the prompt ends that a position is computed in. int64 [N]."""
    return np.minimum((positions // align + 1) * align, num_prompt)


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
