"""The consuming side of a ring. `ring` explains what its checks are for."""

from __future__ import annotations

import os
import threading
import time
from typing import Final
from zlib import crc32

from broker.ring.errors import RingCorrupt
from broker.ring.layout import (
    CHECKED,
    HEADER,
    HEADER_BYTES,
    READ_POS_AT,
    READER_TICKET_AT,
    U64_MASK,
    WRITE_POS_AT,
    WRITER_TICKET_AT,
)
from broker.ring.memory import Ring
from broker.ring.spin import CROWDED_S
from broker.ring.wake import Bell, Sleeper, Waker

#: How long a published record may fail its checks before the reader calls the ring corrupt.
CORRUPT_AFTER_S: Final = 1.0
#: And how often it must have been looked at in that time.
CORRUPT_AFTER_LOOKS: Final = 100

_LOOKS: Final = range(16)  # between two offers of the core to others, about a microsecond


class RingReader:
    """The consuming side of a ring; one per ring, used by one thread."""

    __slots__ = (
        "_bad_looks",
        "_bad_since_s",
        "_capacity",
        "_corrupt_after_s",
        "_counters",
        "_data",
        "_fence",
        "_mask",
        "_pos",
        "_sleeper",
        "_waker",
    )

    def __init__(
        self,
        ring: Ring,
        reader_bell: Bell | None = None,
        writer_bell: Bell | None = None,
        corrupt_after_s: float = CORRUPT_AFTER_S,
    ) -> None:
        """Continue at the ring's read position.

        reader_bell is the one this side polls when empty; writer_bell wakes a writer that waits for
        room. corrupt_after_s: how long a record may fail its checks before RingCorrupt.
        """
        self._counters = ring.counters
        self._data = ring.data
        self._capacity = ring.capacity_bytes
        self._mask = ring.capacity_bytes - 1
        self._pos: int = ring.counters[READ_POS_AT]
        self._corrupt_after_s = corrupt_after_s
        self._bad_since_s = 0.0
        self._bad_looks = 0
        self._fence = threading.Lock()
        self._waker = Waker(writer_bell)
        self._sleeper = Sleeper(ring.counters, READER_TICKET_AT, reader_bell)

    def read(self) -> tuple[int, bytes] | None:
        """Take the next record as (kind, payload), or None if there is none yet.

        Raises RingCorrupt as `read_batch` does.
        """
        if self._counters[WRITE_POS_AT] == self._pos:
            return None
        records = self.read_batch(1)
        return records[0] if records else None

    def read_batch(self, max_records: int) -> list[tuple[int, bytes]]:
        """Take up to so many records, in order; the room they took is given back once, at the end.

        Returns copies: [(kind, payload)], empty if there is nothing yet.
        Raises RingCorrupt when the record at the read position kept failing its checks; the
        records before it have been returned by earlier calls.
        """
        counters = self._counters
        pos = taken = self._pos
        available = (counters[WRITE_POS_AT] - pos) & U64_MASK
        if not available:
            return []
        data, mask, capacity = self._data, self._mask, self._capacity
        records: list[tuple[int, bytes]] = []
        is_sound = available <= capacity
        while available and is_sound and len(records) < max_records:
            at = pos & mask
            if capacity - at < HEADER_BYTES:
                pos = (pos + capacity - at) & U64_MASK
                available -= capacity - at
                continue
            stamp, length, kind, crc = HEADER.unpack_from(data, at)
            size = (length + HEADER_BYTES + 7) & ~7
            is_sound = stamp == pos and size <= available and size <= capacity - at
            if not is_sound:
                break
            at += HEADER_BYTES
            payload = data[at : at + length].tobytes() if kind else b""
            is_sound = crc32(payload, crc32(CHECKED.pack(stamp, length, kind))) == crc
            if not is_sound:
                break
            pos = (pos + size) & U64_MASK
            available -= size
            if kind:
                records.append((kind, payload))
                taken = pos  # a skip is only passed together with the record after it
        if records:
            self._advance(taken)
        elif not is_sound:
            self._note_mismatch(pos)
        return records

    def has_records(self) -> bool:
        """Whether the writer has published something that was not taken."""
        return bool(self._counters[WRITE_POS_AT] != self._pos)

    def prepare_wait(self) -> bool:
        """Announce that this side sleeps, and look once more.

        True: the ring is empty, poll `fileno()` for at most `wake.MAX_POLL_MS`, then call
        `finish_wait`. False: records are there, and nothing was announced.
        """
        self._sleeper.announce()
        if self._counters[WRITE_POS_AT] != self._pos:
            self._sleeper.retract()
            return False
        return True

    def finish_wait(self) -> None:
        """End a sleep that `prepare_wait` announced; read after this, not before."""
        self._sleeper.finish()

    def stay_awake(self) -> None:
        """Undo `prepare_wait` without a look at the bell: a ring for it may still come."""
        self._sleeper.retract()

    def fileno(self) -> int:
        """The eventfd that becomes readable when something is written for a sleeping reader."""
        return self._sleeper.fileno()

    def wait(self, timeout_s: float, spin_s: float = 0.0, watch_fd: int = -1) -> bool:
        """Block until a record is there: spin for a moment, then sleep on the bell.

        Returns False if `timeout_s` passed first, or `watch_fd` (a socket that tells the peer's
        death) became readable while nothing was there.
        """
        if spin_s > 0 and self._spin(min(spin_s, timeout_s)):
            return True
        return self._sleeper.wait(self.has_records, timeout_s, watch_fd)

    def _spin(self, spin_s: float) -> bool:
        """Look for a record without sleeping; False when time is up or others want the core."""
        counters, pos = self._counters, self._pos
        now_s = time.monotonic()
        end_s = now_s + spin_s
        while now_s < end_s:
            for _ in _LOOKS:
                if counters[WRITE_POS_AT] != pos:
                    return True
            os.sched_yield()
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > CROWDED_S:
                break
        return False

    def _advance(self, pos: int) -> None:
        """Give the room up to `pos` back, and wake a writer that waits for it."""
        self._pos = pos
        self._bad_looks = 0
        counters = self._counters
        counters[READ_POS_AT] = pos
        with self._fence:
            pass
        ticket = counters[WRITER_TICKET_AT]
        if ticket & 1:
            self._waker.wake(ticket)

    def _note_mismatch(self, pos: int) -> None:
        """The next record, at `pos`, fails its checks: not visible yet, or never to be."""
        now_s = time.monotonic()
        if not self._bad_looks:
            self._bad_since_s = now_s
        self._bad_looks += 1
        bad_for_s = now_s - self._bad_since_s
        if self._bad_looks >= CORRUPT_AFTER_LOOKS and bad_for_s >= self._corrupt_after_s:
            at = pos & self._mask
            raise RingCorrupt(
                f"record at position {pos} (byte {at} of {self._capacity}) failed its stamp "
                f"or CRC check {self._bad_looks} times in {bad_for_s:.3f} s; write position "
                f"{self._counters[WRITE_POS_AT]}, header {self._data[at : at + 20].hex()}"
            )
