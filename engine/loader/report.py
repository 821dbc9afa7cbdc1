"""What a loader tells its caller while and after it reads a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.model.spec import ModelSpec
from engine.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of checkpoint read so far, of all there are."""

    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    read_bytes: checkpoint bytes read; load_s: seconds from opening the file to the last tensor.
    """

    spec: ModelSpec
    weights: ModelWeights
    read_bytes: int
    load_s: float


def no_progress(progress: LoadProgress) -> None:
    """A callback for callers that do not watch."""
