"""Small host buffers in pinned memory: what a step sends to the device and gets back.

At most two steps are in flight, so a ring of three is never written while a step still reads it: a
step is in flight until the host has seen its stamp, which its last kernel writes when all before it
is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import IntegrityError
from kernels.step_slots import publish_results

NUM_SLOTS = 3
_ALIGNED_INTS = 4
_LOOK_EVERY_S = 0.02
"""Without a stamp for so long, a waiting host asks how the device is."""

IntArray = npt.NDArray[np.int32]


def aligned(num_ints: int) -> int:
    """The next number of int32 that ends at 16 bytes: what begins there needs no kernels compiled
    for odd pointers."""
    return -(-num_ints // _ALIGNED_INTS) * _ALIGNED_INTS


class StepSlots:
    """Slots of pinned memory that kernels read and write in place; step n has slot n % NUM_SLOTS.

    The device counts steps in `count`, which the kernel of `publish` raises; the host counts in
    `next_step`. They agree by one rule, whichever way a step takes: `publish` is its last launch,
    and `launched` is called once that is enqueued. Work that is no step (compiling, capturing) has
    slots of its own. A step that failed before its `publish` was enqueued never was: its number,
    and its slot, are the next one's.

    inputs int32 [NUM_SLOTS, num_inputs], -1 at first: padding. count int64 [1] on the device.
    """

    def __init__(self, num_inputs: int, max_rows: int, device: torch.device) -> None:
        self.inputs = _pinned(num_inputs, torch.int32, device).fill_(-1)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.next_step = 0
        self._outs = (
            _pinned(max_rows, torch.int32, device),
            _pinned(max_rows, torch.int8, device),
            _pinned(1, torch.int64, device).view(-1),
        )
        self._inputs = self.inputs.numpy()
        self._tokens, self._bad, self._stamps = (tensor.numpy() for tensor in self._outs)
        self._stamps[:] = range(-NUM_SLOTS, 0)
        self._stamp_view = self._stamps.data  # read in half the time
        self._fence = threading.Lock()
        self._is_async = device.type == "cuda"

    def next_inputs(self) -> IntArray:
        """Where the host writes the inputs of the step that it launches next. Raises
        IntegrityError where the device has counted more steps."""
        self._check(self.next_step - NUM_SLOTS)
        host: IntArray = self._inputs[self.next_step % NUM_SLOTS]
        return host

    def publish(self, tokens: torch.Tensor, bad: torch.Tensor, pdl: bool = False) -> None:
        """Enqueue the end of a step: tokens int32 [S] and bad int8 [S] go to its slot."""
        publish_results(*self._outs, self.count, tokens, bad, pdl)

    def launched(self) -> int:
        """Count the step whose `publish` was just enqueued; returns its number."""
        step = self.next_step
        self.next_step += 1
        return step

    def wait(self, step: int) -> None:
        """Return when a launched step has ended: its stamp is in its slot, so all it read and wrote
        is done with. Keeps a core busy until then; handlers of signals run.

        Raises IntegrityError where the device has nothing left to do and another stamp is there,
        and what the device failed with.
        """
        stamps, slot, now = self._stamp_view, step % NUM_SLOTS, time.monotonic
        interval_s = _LOOK_EVERY_S if self._is_async else 0.0
        look_s = now() + interval_s
        while stamps[slot] != step:
            if now() < look_s:
                continue
            if self._is_idle():
                self._check(step)  # again: the stamp may have come since the loop read it
                break
            look_s = now() + interval_s
        # The results are read after the stamp. x86 keeps loads in order by itself; elsewhere, what
        # is loaded before a lock is given back stays before that, and what is loaded after a lock
        # is taken stays behind that, so it takes one given back and then one taken.
        for _ in range(2):
            with self._fence:
                pass

    def results(self, step: int) -> tuple[IntArray, npt.NDArray[np.int8]]:
        """Tokens and bad flags in the slot of a step that was waited for, as views. Raises
        IntegrityError where the device has counted fewer steps: its inputs were another's then."""
        self._check(step)
        return self._tokens[step % NUM_SLOTS], self._bad[step % NUM_SLOTS]

    def _is_idle(self) -> bool:
        """Whether the device has done all that was launched; raises what it failed with."""
        return not self._is_async or bool(torch.cuda.current_stream().query())

    def _check(self, step: int) -> None:
        stamp = self._stamps[step % NUM_SLOTS]
        if stamp != step:
            raise IntegrityError(
                f"slot {step % NUM_SLOTS} holds the results of step {stamp}, not of {step}"
            )


def _pinned(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(NUM_SLOTS, length, dtype=dtype, pin_memory=device.type == "cuda")


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
            at = aligned(end)
        self._device[:at].copy_(tensor[:at], non_blocking=True)
        return [self._device[begin:end] for begin, end in spans]
