"""A byte stream cut into the frames of its protocol: faults hit between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol


class Framer(Protocol):
    """One direction of one connection."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every frame that these bytes complete; joined, the frames are the stream."""


class RawFramer:
    """Every read is a frame."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


class _Buffered(ABC):
    """Keeps what is not a whole frame yet."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while self._buffer and (size := self.frame_size(self._buffer)) is not None:
            frame, self._buffer = self._buffer[:size], self._buffer[size:]
            yield frame

    @abstractmethod
    def frame_size(self, buffer: bytes) -> int | None:
        """Size of the frame at the start of the buffer; None while it is incomplete."""


class ZmtpFramer(_Buffered):
    """ZMTP 3: the greeting as it comes, then frames of flags, length and body.

    Each side of the greeting waits for parts of the other's, so its 64 bytes must not be held.
    """

    def __init__(self) -> None:
        super().__init__()
        self._greeting_left = 64

    def frame_size(self, buffer: bytes) -> int | None:
        if self._greeting_left:
            size = min(self._greeting_left, len(buffer))
            self._greeting_left -= size
            return size
        is_long = buffer[0] & 2
        head = 9 if is_long else 2
        if len(buffer) < head:
            return None
        size = head + int.from_bytes(buffer[1:head], "big")
        return size if len(buffer) >= size else None


class RespFramer(_Buffered):
    """Redis: one command, or one reply (RESP 2 and 3), nested arrays included."""

    def frame_size(self, buffer: bytes) -> int | None:
        at, left = 0, 1
        while left:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                return None
            kind, number = buffer[at : at + 1], buffer[at + 1 : end]
            at = end + 2
            left -= 1
            if kind in b"*~>":
                left += max(int(number), 0)
            elif kind in b"%|":
                left += 2 * int(number) + (kind == b"|")
            elif kind in b"$=!" and int(number) >= 0:
                at += int(number) + 2
        return at if at <= len(buffer) else None
