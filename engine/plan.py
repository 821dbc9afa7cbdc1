"""What the scheduler tells a runner, and what the runner gives back. No torch.

A request holds one stable row from admission to its end, preemption included; only its KV blocks
come and go. The
runner keeps device tables indexed by row: token ids by position, sampling parameters, the block
table. A plan names the rows of one step and carries only what changed. The token sampled for a row
in step N is written by the runner into the row's token table, so step N+1 can be planned and
launched before the host has seen it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from broker.ring.records import Sampling

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewRow:
    """State of a row that a request takes over; written before the step runs.

    token_ids: int32 [L], the prompt and any output of earlier attempts. The first token to be
    sampled has position L. stop_token_ids may not be sampled at positions below min_position
    (min_tokens).
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    sampling: Sampling
    stop_token_ids: IntArray
    min_position: int


class StepPlan(NamedTuple):
    """One step. R rows; the first num_decode rows compute one token each; the rest are prompt
    chunks.

    A decode row with `sample` unset computes the KV of an output token that is known already (of a
    continued run, or of one that lost its KV) and yields nothing. Only runners with
    `RunnerInfo.replays_by_decode` get such rows; for the others those tokens are part of the prompt
    chunks, and all decode rows sample.

    rows int32 [R]: row numbers. num_computed int32 [R]: tokens whose KV is in the cache before the
    step. num_new int32 [R]: tokens to compute, at positions num_computed .. num_computed + num_new
    - 1. sample bool [R]: the row's last position yields a token, written at position num_computed
    + num_new. block_rows, block_cols, block_ids int32 [D]: changed block table entries, applied
    before the step. samples_all: every row has `sample` set; where it is not set nothing is said.
    """

    step_id: int
    new_rows: tuple[NewRow, ...]
    block_rows: IntArray
    block_cols: IntArray
    block_ids: IntArray
    rows: IntArray
    num_computed: IntArray
    num_new: IntArray
    sample: BoolArray
    num_decode: int
    samples_all: bool = False


class StepResult(NamedTuple):
    """Tokens of one step, in the order of the plan's rows with sample set.

    token_ids int32 [S]. bad bool [S]: the row's logits were not finite, its token means nothing.
    """

    step_id: int
    token_ids: IntArray
    bad: BoolArray


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts of a loaded model and its cache, fixed once the runner is ready."""

    model: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int  # the scheduler hands out 0 .. num_blocks - 1; a dummy block lies beyond
    max_num_seqs: int
    max_num_batched_tokens: int
    load_s: float
    weight_bytes: int
    kv_bytes: int
    quantization: str = "none"
    chunk_align_tokens: int = 1
    """Prompt chunks end at multiples of it or at the prompt's end, and prefix hits are multiples of
    it, so where the pieces of a prompt begin and end does not depend on what else is computed."""
    replays_by_decode: bool = False
    """Output tokens are always computed by decode rows, also for the second time, so their KV has
    the same bits again. Needed where prompt chunks and decode rows round differently."""
    max_held_stop_ids: int = 1 << 30  # stop ids that min_tokens can hold back in one row


class Runner(Protocol):
    """Executes plans. Synchronous runners do the work in `launch`; asynchronous ones only enqueue
    it there."""

    info: RunnerInfo
    is_async: bool  # True: the loop launches step N+1 before it collects step N

    def launch(self, plan: StepPlan) -> None:
        """Start one step. At most two steps are in flight; `collect` is called once for each, in
        order."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its tokens."""
        ...

    def prepare(self) -> bool:
        """Do one piece of work ahead of need, such as capturing a graph; False if none is left.

        The loop calls it in idle moments, with no step in flight.
        """
        ...

    def close(self) -> None:
        """Free device memory and threads."""
        ...
