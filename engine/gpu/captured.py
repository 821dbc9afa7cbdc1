"""A step as one CUDA graph, with its inputs and results in slots of pinned memory."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.gpu.staging import IntArray, StepSlots
from engine.plan import StepPlan
from kernels.carveout import shared_memory_share


class CaptureSite:
    """What captured steps share: a memory pool, and the stream on which each is compiled, since
    cuBLAS keeps a workspace for every stream that it has seen."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """Made for the first capture."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream


class CapturedStep(ABC):
    """Captures `run` once and replays it. Lengths and row numbers are read from `slots`.

    `run` must be safe on inputs of -1 (padding only): it runs so once, to compile its kernels.
    """

    def __init__(self, slots: StepSlots) -> None:
        self._slots = slots
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def shared_percent(self) -> int | None:
        """Share of shared memory that its kernels ask for (`kernels.carveout`)."""
        return None

    @abstractmethod
    def fill(self, plan: StepPlan, host: IntArray) -> int:
        """Write the plan's numbers into a slot; returns how many results to fetch."""

    @abstractmethod
    def run(self, slots: StepSlots) -> None:
        """Launch the step's kernels on the current stream: the inputs of its slot first, `publish`
        last."""

    def capture(self, spare: StepSlots, site: CaptureSite) -> None:
        """Compile by a step of padding in the spare slots, then record; waits for all work that
        was launched before. No step of `slots` is counted."""
        stream = site.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), shared_memory_share(self.shared_percent):
            self.run(spare)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            shared_memory_share(self.shared_percent),
            torch.cuda.graph(graph, pool=site.pool, capture_error_mode="thread_local"),
        ):
            self.run(self._slots)
        self._graph = graph

    def replay(self) -> None:
        """Launch on the current stream; the slot has been filled."""
        assert self._graph is not None, "replay before capture"
        self._graph.replay()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is freed while another one is captured spoils the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
