"""Small host buffers in pinned memory: what a step sends to the device and gets back.

At most two steps are in flight, so a ring of three is never written while a copy still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

NUM_SLOTS = 3
_ALIGNED_INTS = 4  # views start at 16 bytes: kernels are not compiled again for odd pointers

IntArray = npt.NDArray[np.int32]


class PinnedRing:
    """NUM_SLOTS pinned int32 buffers used in turn."""

    def __init__(self, capacity: int) -> None:
        self._tensors = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            for _ in range(NUM_SLOTS)
        ]
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._next = 0

    def take(self) -> tuple[torch.Tensor, IntArray]:
        """The next buffer, as a tensor and as the array over the same memory."""
        index = self._next
        self._next = (index + 1) % NUM_SLOTS
        return self._tensors[index], self._arrays[index]


class StepUpload:
    """Packs the int32 arrays of one step into one pinned buffer and copies them in one piece."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._host = PinnedRing(capacity)
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def send(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """Copy arrays to the device, asynchronously, in order; returns their int32 views there."""
        tensor, host = self._host.take()
        at = 0
        spans = []
        for array in arrays:
            end = at + len(array)
            host[at:end] = array
            spans.append((at, end))
            at = -(-end // _ALIGNED_INTS) * _ALIGNED_INTS
        self._device[:at].copy_(tensor[:at], non_blocking=True)
        return [self._device[begin:end] for begin, end in spans]
