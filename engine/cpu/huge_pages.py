"""Moves weights onto huge pages, piece by piece, while the engine is idle.

A decode step reads every weight once, and the processor's prefetch stops at the end of each page;
with pages of 2 MiB a step of one token took a tenth less time. Weights lie in allocations of less
than 2 MiB each, which the kernel does not move by itself.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import structlog

_HUGE_BYTES = 2 << 20
_PIECE_BYTES = 16 << 20  # moved in some 20 ms: a request waits no longer
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # since Linux 6.1; an older kernel refuses it and nothing is moved

log = structlog.get_logger(__name__)


class HugePages:
    """The memory of this process, as it is at the first call."""

    def __init__(self) -> None:
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._pieces: deque[tuple[int, int]] | None = None
        self._moved_bytes = 0

    def move_some(self) -> bool:
        """Move one piece; False if none is left."""
        if self._pieces is None:
            self._pieces = deque(private_pieces(Path("/proc/self/maps").read_text()))
        if not self._pieces:
            return False
        address, size = self._pieces.popleft()
        self._madvise(address, size, _MADV_HUGEPAGE)
        if self._madvise(address, size, _MADV_COLLAPSE) == 0:
            self._moved_bytes += size
        if not self._pieces:
            log.info("runner.huge_pages", moved_mib=self._moved_bytes >> 20)
        return bool(self._pieces)


def private_pieces(maps: str) -> Iterator[tuple[int, int]]:
    """Parts (address, bytes) of writable memory without a file, whole huge pages each.

    maps: text of /proc/<pid>/maps.
    """
    for line in maps.splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions != "rw-p" or (path and path[0] != "[heap]"):
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        start = -(-start // _HUGE_BYTES) * _HUGE_BYTES
        end = end // _HUGE_BYTES * _HUGE_BYTES
        for address in range(start, end, _PIECE_BYTES):
            yield address, min(_PIECE_BYTES, end - address)
