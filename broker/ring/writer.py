"""The producing side of a ring. `ring` explains the order of its stores."""

from __future__ import annotations

import threading
from zlib import crc32

from broker.ring import layout
from broker.ring.errors import RecordTooLarge, RingCorrupt
from broker.ring.layout import (
    CHECKED,
    HEADER,
    HEADER_BYTES,
    KIND_SKIP,
    READ_POS_AT,
    READER_TICKET_AT,
    U64_MASK,
    WRITE_POS_AT,
    WRITER_TICKET_AT,
)
from broker.ring.memory import Ring
from broker.ring.wake import Bell, Sleeper, Waker


class RingWriter:
    """The producing side of a ring; one per ring, used by one thread."""

    __slots__ = (
        "_capacity",
        "_counters",
        "_data",
        "_fence",
        "_free",
        "_mask",
        "_max_record",
        "_pos",
        "_sleeper",
        "_waker",
    )

    def __init__(
        self, ring: Ring, reader_bell: Bell | None = None, writer_bell: Bell | None = None
    ) -> None:
        """Continue at the ring's write position.

        reader_bell wakes a sleeping reader; writer_bell is the one this side polls when full.
        """
        self._counters = ring.counters
        self._data = ring.data
        self._capacity = ring.capacity_bytes
        self._mask = ring.capacity_bytes - 1
        self._max_record = ring.capacity_bytes // 2
        self._pos: int = ring.counters[WRITE_POS_AT]
        self._free = self._measure_free()
        self._fence = threading.Lock()
        self._waker = Waker(reader_bell)
        self._sleeper = Sleeper(ring.counters, WRITER_TICKET_AT, writer_bell)

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload `try_write` takes."""
        return self._max_record - HEADER_BYTES

    def try_write(self, kind: int, payload: bytes | bytearray | memoryview) -> bool:
        """Publish one record, or return False at once if there is no room for it now.

        Args:
            kind: 1 to 2^32 - 1.
            payload: any contiguous bytes, at most `max_payload_bytes`; copied.
        Raises RecordTooLarge; ValueError for a bad kind; RingCorrupt if the read position is
        impossible.
        """
        if type(payload) is not bytes:
            payload = memoryview(payload).cast("B")
        length = len(payload)
        size = (length + HEADER_BYTES + 7) & ~7
        if size > self._max_record or kind <= 0:
            self._refuse(kind, length)
        pos = self._pos
        at = pos & self._mask
        tail = self._capacity - at
        needed = size if size <= tail else size + tail
        if needed > self._free:
            self._free = self._measure_free()
            if needed > self._free:
                return False
        if size > tail:
            self._write_skip(pos, at, tail)
            pos = (pos + tail) & U64_MASK
            at = 0
        data = self._data
        crc = crc32(payload, crc32(CHECKED.pack(pos, length, kind)))
        HEADER.pack_into(data, at, pos, length, kind, crc)
        at += HEADER_BYTES
        data[at : at + length] = payload
        self._pos = pos = (pos + size) & U64_MASK
        self._free -= needed
        counters = self._counters
        counters[WRITE_POS_AT] = pos
        with self._fence:
            pass
        ticket = counters[READER_TICKET_AT]
        if ticket & 1:
            self._waker.wake(ticket)
        return True

    def has_room(self, payload_bytes: int) -> bool:
        """Whether `try_write` of such a payload would succeed now."""
        size = layout.record_bytes(payload_bytes)
        tail = self._capacity - (self._pos & self._mask)
        self._free = self._measure_free()
        return self._free >= (size if size <= tail else size + tail)

    def prepare_wait(self, payload_bytes: int) -> bool:
        """Announce that this side sleeps until such a payload fits.

        True: it does not fit yet, poll `fileno()` for at most `wake.MAX_POLL_MS`, then call
        `finish_wait`. False: it fits now, and nothing was announced.
        """
        self._sleeper.announce()
        if self.has_room(payload_bytes):
            self._sleeper.retract()
            return False
        return True

    def finish_wait(self) -> None:
        """End a sleep that `prepare_wait` announced."""
        self._sleeper.finish()

    def fileno(self) -> int:
        """The eventfd that becomes readable when the reader made room for a sleeping writer."""
        return self._sleeper.fileno()

    def wait(self, payload_bytes: int, timeout_s: float, watch_fd: int = -1) -> bool:
        """Block until such a payload fits.

        Returns False if `timeout_s` passed first, or `watch_fd` became readable meanwhile.
        """
        return self._sleeper.wait(lambda: self.has_room(payload_bytes), timeout_s, watch_fd)

    def used_bytes(self) -> int:
        """Bytes published and not yet consumed, as of now."""
        return self._capacity - self._measure_free()

    def _measure_free(self) -> int:
        used: int = (self._pos - self._counters[READ_POS_AT]) & U64_MASK
        if used > self._capacity:
            raise RingCorrupt(
                f"read position {self._counters[READ_POS_AT]} is impossible with write position "
                f"{self._pos} in a ring of {self._capacity} bytes"
            )
        return self._capacity - used

    def _write_skip(self, pos: int, at: int, tail: int) -> None:
        """Mark the rest of the data as skipped; published together with the record after it."""
        if tail >= HEADER_BYTES:
            length = tail - HEADER_BYTES
            crc = crc32(CHECKED.pack(pos, length, KIND_SKIP))
            HEADER.pack_into(self._data, at, pos, length, KIND_SKIP, crc)

    def _refuse(self, kind: int, length: int) -> None:
        if kind <= 0:
            raise ValueError(f"record kind must be 1 to {layout.MAX_KIND}, got {kind}")
        raise RecordTooLarge(
            f"record of {length} bytes is over the limit of {self.max_payload_bytes} bytes "
            f"(half of a ring of {self._capacity} bytes); use a larger ring"
        )
