"""Waking the other side: eventfd bells, sleep tickets and the store-load fence they need.

**The protocol.** Who wants to sleep makes its ticket odd, fences, looks once more, and only then
polls its bell. Who publishes stores its counter, fences, and rings the bell if the other side's
ticket is odd and was not rung for yet. So either the sleeper sees the new counter or the publisher
sees the ticket, and one sleep costs one eventfd write however many records arrive until the sleeper
runs.

**Why a fence.** "Store mine, then load yours" on both sides is the one order that x86 does not keep
by itself: a store waits in the core's store buffer while the later load is already answered
(StoreLoad). Both sides could then read the old value, and the record would lie there until the next
one. Only a fence or a LOCK-prefixed instruction drains the buffer in between. Python has no fence,
but taking and releasing an uncontended lock runs two LOCK-prefixed instructions, for 50 to 90 ns;
which lock does not matter, so each side has its own and can never block on it.

**And if not.** No specification of the language promises that, and on ARM a lock is weaker than a
full fence. So no poll is unbounded: `MAX_POLL_MS` caps each, and a lost wake-up costs at most that.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

#: Longest single poll of a bell, in milliseconds: the bound on what a lost wake-up could cost.
#: Measured on a busy 2-core virtual machine: an idle reader costs 0.22 % of a core (0.45 at 20 ms).
MAX_POLL_MS: Final = 50


class Bell:
    """An eventfd that one process rings and the other polls. Owns its descriptor."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int | None = None) -> None:
        """Takes over `fd`, or makes a new eventfd."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def fileno(self) -> int:
        """The descriptor to poll for readability; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable. Never blocks."""
        # Full only after 2^64 - 2 rings that nobody drained; it is readable then anyway.
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            return

    def drain(self) -> None:
        """Make the descriptor unreadable until the next ring. Never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Sleeper:
    """The sleeping half of the protocol, for one side of one ring: its ticket, fence and bell."""

    __slots__ = ("_bell", "_counters", "_fence", "_poll", "_ticket", "_ticket_at", "_watch_fd")

    def __init__(self, counters: memoryview, ticket_at: int, bell: Bell | None) -> None:
        self._counters = counters
        self._ticket_at = ticket_at
        self._ticket = counters[ticket_at]
        self._bell = bell
        self._fence = threading.Lock()
        self._poll = select.poll()
        self._watch_fd = -1

    def announce(self) -> None:
        """Make the ticket odd, visibly before anything that the caller loads afterwards."""
        if not self._ticket & 1:
            self._ticket += 1
            self._counters[self._ticket_at] = self._ticket
        with self._fence:
            pass

    def retract(self) -> None:
        """Make the ticket even. A ring on its way may still come: a spurious wake-up later."""
        if self._ticket & 1:
            self._ticket += 1
            self._counters[self._ticket_at] = self._ticket

    def finish(self) -> None:
        """End a sleep: retract, then silence the bell. Look for records after this, not before."""
        self.retract()
        if self._bell is not None:
            self._bell.drain()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float, watch_fd: int) -> bool:
        """Sleep until `is_ready`, the timeout, or something to read on `watch_fd` (-1: none).

        Returns the last answer of `is_ready`.
        """
        if watch_fd != self._watch_fd or self._watch_fd == -1:
            self._register(watch_fd)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.announce()
            if is_ready():
                self.retract()
                return True
            left_ms = max((deadline_s - time.monotonic()) * 1000, 0)
            events = self._poll.poll(min(left_ms, MAX_POLL_MS))
            self.finish()
            if is_ready():
                return True
            if left_ms == 0 or any(fd == watch_fd for fd, _ in events):
                return False

    def _register(self, watch_fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(self.fileno(), select.POLLIN)
        if watch_fd >= 0:
            self._poll.register(watch_fd, select.POLLIN)
        self._watch_fd = watch_fd

    def fileno(self) -> int:
        """The bell's descriptor. Raises ValueError for a ring that was made without bells."""
        if self._bell is None:
            raise ValueError("this side of the ring has no bell to poll")
        return self._bell.fileno()


class Waker:
    """The waking half: rings the other side's bell once a sleep."""

    __slots__ = ("_bell", "_rung_for")

    def __init__(self, bell: Bell | None) -> None:
        self._bell = bell
        self._rung_for = 0

    def wake(self, ticket: int) -> None:
        """The other side sleeps under this (odd) ticket: ring unless that was done."""
        if ticket != self._rung_for and self._bell is not None:
            self._rung_for = ticket
            self._bell.ring()
