"""The loop's two ends on a real link: requests from one ring, events into the other, death from
the socket.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from broker.ring.link import EngineLink
from broker.ring.spin import SpinGauge
from engine.errors import LinkLost

_PEER_CHECK_S = 0.05  # how often a busy loop looks at the socket


class StopSignal:
    """A flag with a descriptor, so that a signal handler can end a blocking wait."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False
        self._callback: Callable[[], None] | None = None

    def fileno(self) -> int:
        """Readable from `set` on."""
        return self._fd

    def set(self) -> None:
        """Raise the flag for good; safe in a signal handler."""
        self.is_set = True
        os.eventfd_write(self._fd, 1)
        if self._callback is not None:
            self._callback()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call this too when the flag is raised; at once if it is already."""
        self._callback = callback
        if self.is_set:
            callback()

    def wait(self, timeout_s: float) -> bool:
        """Block until the flag is raised or time is up; returns the flag."""
        select.select([self._fd], [], [], timeout_s)
        return self.is_set

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


class LinkMailbox:
    """RequestSource and EventSink over an EngineLink."""

    def __init__(self, link: EngineLink, stop: StopSignal) -> None:
        self._link = link
        self._requests = link.requests
        self.try_write = link.events.try_write
        self._watch = select.epoll()
        self._watch.register(link.sock.fileno(), select.EPOLLIN)
        self._watch.register(stop.fileno(), select.EPOLLIN)
        self._peer_check_s = 0.0
        self._gauge = SpinGauge()

    def read(self, max_records: int) -> list[tuple[int, bytes]]:
        """Records that are there now; what a dead broker still wrote comes before the LinkLost."""
        records = self._requests.read_batch(max_records)
        if not records and time.monotonic() >= self._peer_check_s:
            self._check_peer("read")
        return records

    def wait(self, timeout_s: float) -> bool:
        """Block until a request is there; False: time is up, the broker is gone or `stop` was
        set.
        """
        self._peer_check_s = 0.0
        gauge = self._gauge
        start_s = time.monotonic()
        spin_s = gauge.spin_s if gauge.is_worth_it else 0.0
        is_there = self._requests.wait(timeout_s, spin_s, self._watch.fileno())
        gauge.note(time.monotonic() - start_s)
        return is_there

    def wait_room(self, payload_bytes: int, timeout_s: float) -> None:
        """Block until a record of this size fits. Raises LinkLost when the broker is gone."""
        if not self._link.events.wait(payload_bytes, timeout_s, self._watch.fileno()):
            self._check_peer("write")

    def close(self) -> None:
        """Close the descriptors of this end and the link."""
        self._watch.close()
        self._link.close()

    def _check_peer(self, where: str) -> None:
        if self._link.is_peer_gone() and not self._requests.has_records():
            raise LinkLost(where)
        self._peer_check_s = time.monotonic() + _PEER_CHECK_S
