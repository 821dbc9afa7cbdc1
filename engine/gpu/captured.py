"""A step as one CUDA graph over one small int32 input buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class CapturedStep(ABC):
    """Captures `run` once and replays it. Lengths and row numbers live in `inputs`, on the device.

    `run` must be safe on inputs of -1 (padding only): it runs so once, to compile its kernels.
    """

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.inputs = torch.full((num_inputs,), -1, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @abstractmethod
    def run(self) -> None:
        """Launch the step's kernels on the current stream."""

    def capture(self, pool: Any) -> None:
        """Compile, then record; waits for all work that was launched before."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.run()
        self._graph = graph

    def replay(self, host: torch.Tensor) -> None:
        """Copy the filled pinned buffer to the device and launch, on the current stream."""
        assert self._graph is not None, "replay before capture"
        self.inputs.copy_(host[: len(self.inputs)], non_blocking=True)
        self._graph.replay()
