"""How checkpoint bytes get into a parameter: plainly on the CPU, pinned buffers to a GPU.

Copying from pageable memory makes the driver stage it in small pieces: 16 GB/s on an H200, where
pinned memory gives 55. So bytes go into one of two pinned buffers while the other one is on its way
to the device. They are read from the file by several threads: copying out of a mapped file takes a
page fault for every few pages, which costs more than the copy. Numbers are converted on the device,
never on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

BUFFER_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
"""What one thread reads at a time."""
MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Where a tensor's bytes lie: an open file and the offset of the first one."""

    descriptor: int
    offset: int


class Uploader(Protocol):
    """Copies checkpoint tensors into parameters."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, span: FileSpan | None = None
    ) -> None:
        """target = source, of the same shape; may return before the copy is done.

        span: where the bytes of source may be read from instead.
        """
        ...

    def finish(self) -> None:
        """Wait until every copy is done."""
        ...


class PlainUpload:
    """Copies at once."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, span: FileSpan | None = None
    ) -> None:
        """target = source, converted."""
        target.copy_(source)

    def finish(self) -> None:
        """Nothing is under way."""


class PinnedUpload:
    """Copies through two staging buffers to a CUDA device.

    target must be contiguous. pin False keeps the buffers pageable, for tests without a GPU.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES, pin: bool = True) -> None:
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)
        ]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        self._readers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1), "weights")
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0
        self._is_cuda = pin

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, span: FileSpan | None = None
    ) -> None:
        """target = source; raises ValueError if target is not contiguous, EOFError if the file ends
        early."""
        if not target.is_contiguous():
            raise ValueError(f"target of shape {tuple(target.shape)} is not contiguous")
        if target.dtype == source.dtype:
            self._send(target, source, span)
            return
        raw = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        self._send(raw, source, span)
        target.copy_(raw)

    def finish(self) -> None:
        """Wait until every copy is done, and let the threads go."""
        for index in range(len(self._sent)):
            self._wait(index)
        self._readers.shutdown()

    def _send(self, target: torch.Tensor, source: torch.Tensor, span: FileSpan | None) -> None:
        to = target.view(-1).view(torch.uint8)
        size, buffer_bytes = len(to), len(self._buffers[0])
        for begin in range(0, size, buffer_bytes):
            end = min(begin + buffer_bytes, size)
            index = self._next
            self._next = 1 - index
            self._wait(index)
            staged = self._buffers[index][: end - begin]
            if span is None:
                staged.copy_(source.contiguous().view(-1).view(torch.uint8)[begin:end])
            else:
                self._read(span, begin, self._views[index][: end - begin])
            to[begin:end].copy_(staged, non_blocking=True)
            if self._is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._sent[index] = event

    def _read(self, span: FileSpan, begin: int, view: memoryview) -> None:
        """Fill the view with the span's bytes from `begin` on."""

        def read(at: int) -> None:
            _read_exactly(span, begin + at, view[at : at + PIECE_BYTES])

        pieces = range(0, len(view), PIECE_BYTES)
        if len(pieces) == 1:
            read(0)
        else:
            for _ in self._readers.map(read, pieces):
                pass

    def _wait(self, index: int) -> None:
        event = self._sent[index]
        if event is not None:
            event.synchronize()
            self._sent[index] = None


def _read_exactly(span: FileSpan, begin: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(span.descriptor, [view[done:]], span.offset + begin + done)
        if count == 0:
            raise EOFError(f"file ends {len(view) - done} bytes before a tensor does")
        done += count


def make_upload(device: torch.device | str) -> Uploader:
    """The uploader for a device."""
    return PinnedUpload() if torch.device(device).type == "cuda" else PlainUpload()


def prefetch(paths: Iterable[Path]) -> None:
    """Ask the kernel to read whole files ahead; a hint, without effect where they are cached."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
