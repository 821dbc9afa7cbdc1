"""What the ledger and the engine link say to each other. Runs are named by rid; all are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.ring.records import Reject, StepEvents, Submit

# ---------------------------------------------------------------- ledger -> link


@dataclass(frozen=True, slots=True)
class StartRun:
    """Write one run to the request ring. Dropped without an answer if no engine is there."""

    run: Submit


@dataclass(frozen=True, slots=True)
class AbortRuns:
    """End these runs; each is answered by a finish event unless it had ended already."""

    rids: Sequence[int]


@dataclass(frozen=True, slots=True)
class PauseRuns:
    """Compute nothing for these runs until `ResumeRuns`."""

    rids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResumeRuns:
    """Inverse of `PauseRuns`."""

    rids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShutdownEngine:
    """The worker ends: tell the engine to exit."""


# ---------------------------------------------------------------- link -> ledger (and text)


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine connected and is ready. info: all of its READY record."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    pid: int
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """The engine is loading. info: its PROGRESS record."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's socket closed; everything it published before was delivered first."""

    pid: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of the engine in order, as they were in the ring when it was read."""

    steps: Sequence[StepEvents]


@dataclass(frozen=True, slots=True)
class RunRejected:
    """The engine cannot take this run."""

    reject: Reject


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A STATS record; it comes on idle too, so it is a sign of life."""

    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RingState:
    """The request ring is full (back-pressure), or has room again."""

    is_full: bool


def engine_up(info: dict[str, Any], pid: int) -> EngineUp:
    """The message for a READY record."""
    cache_tokens = int(info["num_blocks"]) * int(info["block_size"])
    return EngineUp(
        vocab_size=int(info["vocab_size"]),
        max_model_len=min(int(info["max_model_len"]), cache_tokens),
        max_num_seqs=int(info["max_num_seqs"]),
        eos_token_ids=tuple(int(i) for i in info.get("eos_token_ids", ())),
        pid=int(info.get("pid", pid)),
        info=info,
    )
