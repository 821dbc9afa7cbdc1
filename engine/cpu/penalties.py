"""Repetition, presence and frequency penalty on the CPU: logits changed by the tokens a run has.

Repetition acts on tokens of prompt and output, the other two on output alone; all on raw logits,
before temperature and filters, so greedy runs too. What counts is read from the row's token table:
a run that is continued or computed again has the same tokens there, and gets the same logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from broker.ring.records import Sampling
from engine.plan import IntArray

FloatArray = npt.NDArray[np.float32]


class RowPenalties:
    """One run's penalties, and how often it has each token, kept from step to step."""

    def __init__(self, sampling: Sampling, num_prompt_tokens: int) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0
        self._num_ids = 0
        self._state = np.zeros(0, np.int32)
        self._ids = np.zeros(0, np.int64)

    def apply(self, logits: FloatArray, token_ids: IntArray) -> None:
        """Change a row's logits, float32 [V], in place. token_ids int32 [L]: all tokens before the
        one to be sampled, L never less than in the call before.
        """
        if not len(self._state):
            self._start(token_ids, len(logits))
        self._catch_up(token_ids)
        ids = self._ids[: self._num_ids]
        x = logits[ids]
        x = np.where(x > 0, x / self._repetition, x * self._repetition)
        counts = self._state[ids] >> 1
        x -= self._frequency * counts.astype(np.float32)
        x -= self._presence * (counts > 0).astype(np.float32)
        logits[ids] = x

    def _start(self, token_ids: IntArray, vocab_size: int) -> None:
        """Make `_state` int32 [V], twice the number of times that a token is in the output, plus 1
        if it is in the prompt, and `_ids`, the tokens whose state is not 0, first of [V].
        """
        prompt = np.unique(token_ids[: self._num_prompt_tokens])
        self._state = np.zeros(vocab_size, np.int32)
        self._state[prompt] = 1
        self._ids = np.empty(vocab_size, np.int64)
        self._ids[: len(prompt)] = prompt
        self._num_ids, self._num_seen = len(prompt), self._num_prompt_tokens

    def _catch_up(self, token_ids: IntArray) -> None:
        """Count the tokens that came since the last call: one, or the output that is known at the
        first.
        """
        for token in token_ids[self._num_seen :].tolist():
            if not self._state[token]:
                self._ids[self._num_ids] = token
                self._num_ids += 1
            self._state[token] += 2
        self._num_seen = len(token_ids)
