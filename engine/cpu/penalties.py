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
        self._state = np.zeros(0, np.int32)

    def apply(self, logits: FloatArray, token_ids: IntArray) -> None:
        """Change a row's logits, float32 [V], in place. token_ids int32 [L]: all tokens before the
        one to be sampled, L never less than in the call before.
        """
        state = self._catch_up(token_ids, len(logits))
        ids = np.flatnonzero(state)
        x = logits[ids]
        x = np.where(x > 0, x / self._repetition, x * self._repetition)
        counts = state[ids] >> 1
        x -= self._frequency * counts.astype(np.float32)
        x -= self._presence * (counts > 0).astype(np.float32)
        logits[ids] = x

    def _catch_up(self, token_ids: IntArray, vocab_size: int) -> IntArray:
        """int32 [V]: twice the number of times a token is in the output, plus 1 if it is in the
        prompt.
        """
        if not len(self._state):
            self._state = np.zeros(vocab_size, np.int32)
            self._state[token_ids[: self._num_prompt_tokens]] = 1
            self._num_seen = self._num_prompt_tokens
        np.add.at(self._state, token_ids[self._num_seen :], 2)
        self._num_seen = len(token_ids)
        return self._state
