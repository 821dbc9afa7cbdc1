"""A job as a value: what the caller wants, before any worker saw it.

Knows field names, types and ranges (see `parse.py` for reading untrusted input); knows no model, no
door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Priority = Literal["high", "normal", "low"]

MAX_SEED = 2**53 - 1  # the largest integer every language's numbers hold exactly


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to end. None means: the model's own default
    (generation_config.json).

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filter off. stop strings are
    cut from the text; stop_token_ids end the job and are part of `ids`. max_tokens counts output
    tokens; None fills the model's length up to a worker's default.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One job. Exactly one of prompt, messages and input_ids is set.

    job: the caller's id, 1-128 characters of [A-Za-z0-9._:-]. deadline_ms: remaining time from
    receipt (ZeroMQ) or from the entry's server time (Redis). model: None accepts whatever the queue
    serves. queue: None accepts whichever this is, a name must be its own. have: output ids of a
    lost attempt that the caller already holds (seqs 1..n); the run continues at seq n + 1 and needs
    the same seed again.
    """

    job: str
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    input_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = "normal"
    deadline_ms: int | None = None
    tenant: str = ""
    idempotency_key: str | None = None
    durable: bool = False
    model: str | None = None
    queue: str | None = None
    have: tuple[int, ...] = ()
