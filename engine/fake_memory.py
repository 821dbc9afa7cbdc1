"""What the fake runner remembers: the tokens of its rows, their block tables, and for each KV slot
what was written there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan import IntArray, NewRow, RunnerInfo, StepPlan

Words = npt.NDArray[np.uint64]

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
BY_DECODE = -1
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


def piece_ends(
    positions: npt.NDArray[np.int64], align: int, num_prompt: int
) -> npt.NDArray[np.int64]:
    """Where the piece of the prompt ends that a position is computed in. int64 [N]."""
    return np.minimum((positions // align + 1) * align, num_prompt)


class FakeMemory:
    """tokens int32 [rows, length], length and num_prompt int32 [rows], table int32 [rows, blocks];
    kv_token, kv_sum and kv_piece_end have one entry a KV slot.
    """

    def __init__(self, info: RunnerInfo) -> None:
        num_rows, num_slots = info.max_num_seqs, info.num_blocks * info.block_size
        self.tokens = np.zeros((num_rows, info.max_model_len + 1), np.int32)
        self.length = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.table = np.full((num_rows, -(-info.max_model_len // info.block_size)), -1, np.int32)
        self.kv_token = np.full(num_slots, -1, np.int32)
        self.kv_sum = np.zeros(num_slots, np.uint64)
        self.kv_piece_end = np.zeros(num_slots, np.int32)
        self._block_size = info.block_size
        self._chunk_align_tokens = info.chunk_align_tokens

    def take_row(self, new: NewRow) -> None:
        """Another run has this row now; it has no blocks yet."""
        row, length = new.row, len(new.token_ids)
        self.tokens[row, :length] = new.token_ids
        self.length[row] = length
        self.table[row] = -1
        self.num_prompt[row] = new.num_prompt_tokens

    def append(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """The rows' next tokens, at these positions."""
        self.tokens[rows, positions] = token_ids
        self.length[rows] = positions + 1

    def compute(self, plan: StepPlan) -> Words:
        """Write a step's KV; returns each row's running sum up to its last token. uint64 [R]."""
        rows, d = plan.rows, plan.num_decode
        sums = np.zeros(len(rows), np.uint64)
        if d:
            sums[:d] = self._decode(rows[:d], plan.num_computed[:d])
        for i in range(d, len(rows)):
            start = int(plan.num_computed[i])
            sums[i] = self._prompt_chunk(int(rows[i]), start, start + int(plan.num_new[i]))
        return sums

    def slots(self, rows: IntArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """KV slot of each row's token at its position. int64 [N]."""
        size = self._block_size
        blocks = self.table[rows, positions // size].astype(np.int64)
        return blocks * size + positions % size

    def _decode(self, rows: IntArray, computed: IntArray) -> Words:
        positions = computed.astype(np.int64)
        before = self.kv_sum[self.slots(rows, np.maximum(positions - 1, 0))]
        before[positions == 0] = 0
        tokens = self.tokens[rows, positions]
        sums = before + token_words(tokens, positions)
        slots = self.slots(rows, positions)
        self.kv_token[slots] = tokens
        self.kv_sum[slots] = sums
        self.kv_piece_end[slots] = BY_DECODE
        return sums

    def _prompt_chunk(self, row: int, start: int, end: int) -> np.uint64:
        positions = np.arange(max(start - 1, 0), end)
        slots = self.slots(np.full(len(positions), row, np.int32), positions)
        words = token_words(self.tokens[row, positions], positions)
        if start:
            words[0] = self.kv_sum[slots[0]]
        sums = np.cumsum(words, dtype=np.uint64)
        self.kv_token[slots] = self.tokens[row, positions]
        self.kv_sum[slots] = sums
        ends = piece_ends(positions, self._chunk_align_tokens, end)
        self.kv_piece_end[slots[-(end - start) :]] = ends[-(end - start) :]
        return np.uint64(sums[-1])
