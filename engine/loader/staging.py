"""Checkpoint bytes to a CUDA device through pinned memory, by threads that never wait for another.

Copying from pageable memory makes the driver stage it in small pieces: 16 GB/s on an H200, where
pinned memory gives 55. So each thread takes the next chunk of a file, reads it into a pinned slot
of its own, and launches the copies out of it; while they run it reads into its other slot. Reading
by a system call costs a copy; out of a mapped file it would cost page faults too. Chunks have one
size whatever the tensors' sizes: a chunk may end in the middle of a tensor, or hold many. Numbers
are converted on the device, never on the CPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import BinaryIO

import torch

from engine.model.errors import CheckpointError

SLOTS_PER_THREAD = 2
MAX_STAGING_BYTES = 512 << 20
"""Pinned memory is taken from everybody else on the machine."""
CHUNK_BYTES = 8 << 20
"""Small enough to stay in the caches on its way, large enough to hide what a chunk costs Python."""
MIN_THREADS, MAX_THREADS = 2, 8
"""Eight threads read 35 GB/s out of the page cache of a machine with 16 processors, sixteen 32."""
_ALIGNED_BYTES = 8  # of the largest number: a chunk holds at least one


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor of a checkpoint on its way into a parameter.

    target: contiguous rows of the parameter. source: of the same shape, mapped from the file and
    not read yet. file, offset: where the bytes of source lie.
    """

    target: torch.Tensor
    source: torch.Tensor
    file: BinaryIO
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.source.numel() * self.source.element_size()


@dataclass(frozen=True, slots=True)
class Staging:
    """Threads that read side by side, and bytes that each of them reads at a time.

    Raises ValueError where one of the two is too small, or all slots together are too large.
    """

    num_threads: int
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}, but one at least has to read")
        if self.chunk_bytes < _ALIGNED_BYTES:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}, less than {_ALIGNED_BYTES}")
        pinned = self.num_threads * SLOTS_PER_THREAD * self.chunk_bytes
        if pinned > MAX_STAGING_BYTES:
            raise ValueError(
                f"{self.num_threads} threads with chunks of {self.chunk_bytes} bytes pin {pinned} "
                f"bytes, more than {MAX_STAGING_BYTES}: use smaller chunks or fewer threads"
            )

    @classmethod
    def for_processors(cls) -> Staging:
        """A thread for each processor that this process may use, within limits."""
        return cls(min(max(len(os.sched_getaffinity(0)), MIN_THREADS), MAX_THREADS))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor in a chunk: `size` bytes from byte `begin` of the tensor on, which lie from
    byte `at` of the chunk on."""

    target: torch.Tensor
    dtype: torch.dtype
    begin: int
    at: int
    size: int


@dataclass(slots=True)
class Chunk:
    """`size` bytes that lie one behind the other in a file, and what they are."""

    file: BinaryIO
    offset: int
    size: int = 0
    pieces: list[Piece] = field(default_factory=list)


def cut(transfers: Iterable[Transfer], chunk_bytes: int) -> list[Chunk]:
    """Chunks with all bytes of all transfers, in their order; no number is cut in two.

    Raises ValueError if a target is not contiguous.
    """
    chunks: list[Chunk] = []
    for t in transfers:
        if not t.target.is_contiguous():
            raise ValueError(f"target of shape {tuple(t.target.shape)} is not contiguous")
        done, item_bytes = 0, t.source.element_size()
        while done < t.num_bytes:
            chunk = chunks[-1] if chunks else None
            follows = (
                chunk is not None
                and chunk.file is t.file
                and chunk.offset + chunk.size == t.offset + done
                and chunk.size + item_bytes <= chunk_bytes
            )
            if chunk is None or not follows:
                chunk = Chunk(t.file, t.offset + done)
                chunks.append(chunk)
            room = (chunk_bytes - chunk.size) // item_bytes * item_bytes
            size = min(t.num_bytes - done, room)
            chunk.pieces.append(Piece(t.target, t.source.dtype, done, chunk.size, size))
            chunk.size += size
            done += size
    return chunks


class _Slot:
    """Memory for one chunk, pinned where there is a GPU; reused when the copies out of it are
    done."""

    def __init__(self, num_bytes: int) -> None:
        is_pinned = torch.cuda.is_available()
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = self.bytes.numpy().data
        # Blocking: a thread that waits leaves its processor to one that reads.
        self._sent = torch.cuda.Event(blocking=True) if is_pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the copies before the last `mark` are done."""
        if self._sent is not None:
            self._sent.synchronize()

    def mark(self) -> None:
        """Note that copies out of it were launched."""
        if self._sent is not None:
            self._sent.record()


class StagedUpload:
    """Reads files and fills targets on `device`; on a CUDA device by a stream of its own.

    On any other device, for tests and measurements, copies are immediate.
    """

    def __init__(self, device: torch.device, staging: Staging) -> None:
        self._staging = staging
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._chunks: deque[Chunk] = deque()
        self._sent: SimpleQueue[int | None] = SimpleQueue()

    def run(self, transfers: Sequence[Transfer], sent: Callable[[int], None]) -> None:
        """Fill all targets; everything is there at the return. As `upload`, whose errors it has."""
        self._chunks.extend(cut(transfers, self._staging.chunk_bytes))
        if self._stream is not None:
            # What used the targets' memory before may still be at work.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            self._run_threads(sent)
        finally:
            if self._stream is not None:
                self._stream.synchronize()

    def _run_threads(self, sent: Callable[[int], None]) -> None:
        num_threads = self._staging.num_threads
        with ThreadPoolExecutor(num_threads, "weights") as pool:
            threads = [pool.submit(self._work) for _ in range(num_threads)]
            try:
                num_running = num_threads
                while num_running:
                    count = self._sent.get()
                    if count is None:
                        num_running -= 1
                    else:
                        sent(count)
            finally:
                self._chunks.clear()  # nobody starts another one
        for thread in threads:
            thread.result()

    def _work(self) -> None:
        """Take chunks until there are none, or another thread has failed."""
        try:
            with torch.cuda.stream(self._stream):
                self._take_chunks()
        finally:
            self._chunks.clear()
            self._sent.put(None)

    def _take_chunks(self) -> None:
        # Pinning takes a while: each thread does it for itself, when others read already.
        slots: deque[_Slot] = deque()
        while self._chunks:
            try:
                chunk = self._chunks.popleft()
            except IndexError:
                return
            if len(slots) < SLOTS_PER_THREAD:
                slots.append(_Slot(self._staging.chunk_bytes))
            else:
                slots.rotate(-1)
            slot = slots[-1]
            slot.wait()
            _read_exactly(chunk.file, chunk.offset, slot.view[: chunk.size])
            for piece in chunk.pieces:
                _send(piece, slot.bytes[piece.at : piece.at + piece.size])
            slot.mark()
            self._sent.put(chunk.size)


def _send(piece: Piece, staged: torch.Tensor) -> None:
    """Launch the copy of staged, uint8 [piece.size], to its place."""
    target = piece.target.view(-1)
    if target.dtype == piece.dtype:
        place = target.view(torch.uint8)[piece.begin : piece.begin + piece.size]
        place.copy_(staged, non_blocking=True)
        return
    raw = torch.empty(piece.size, dtype=torch.uint8, device=target.device)
    raw.copy_(staged, non_blocking=True)
    numbers = raw.view(piece.dtype)
    first = piece.begin // piece.dtype.itemsize
    target[first : first + len(numbers)].copy_(numbers)


def _read_exactly(file: BinaryIO, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file.fileno(), [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(
                f"{file.name} ends before byte {offset + len(view)}, inside a tensor: it was cut "
                "off after it was opened; fetch it again"
            )
        done += count
