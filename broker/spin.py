"""Keeps the broker's loop from sleeping while messages follow each other closely.

The loop turns without waiting for up to `SPIN_S` after a message, if the gauge says that the next
one should be near. At every turn sockets and timers are served as ever, others that wait for the
core get it and end the spin if they keep it, and `look` sees what needs no system call to be seen.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from broker.ring.spin import CROWDED_S, SpinGauge


class LoopSpin:
    """One for each loop. `look` is called at every turn, `rest` when the loop may sleep again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gauge: SpinGauge | None = None) -> None:
        self._loop = loop
        self._gauge = gauge or SpinGauge()
        self._heard_s = 0.0
        self._until_s = 0.0
        self.is_awake = False
        self.look: Callable[[], None] = _nothing
        self.rest: Callable[[], None] = _nothing

    def heard(self) -> None:
        """A message came from a client or the engine."""
        now_s = time.monotonic()
        gauge = self._gauge
        gauge.note(now_s - self._heard_s)
        self._heard_s = now_s
        if gauge.is_worth_it:
            self._until_s = now_s + gauge.spin_s
            if not self.is_awake:
                self.is_awake = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s < self._until_s:
            os.sched_yield()
            if time.monotonic() - now_s < CROWDED_S:
                self.look()
                self._loop.call_soon(self._turn)
                return
        self.is_awake = False
        self.rest()


def _nothing() -> None:
    """Until the engine link says what to look at."""
