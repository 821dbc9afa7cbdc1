"""All actors of one process: started and stopped in order, their bursts run one after the other,
the first crash reported. Knows no message.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

import structlog

from broker.spin import LoopSpin

log = structlog.get_logger("broker.actor")

# After so long, and so many bursts of all actors together, the loop gets a turn.
BURST_S = 0.004
TURN_BURSTS = 32


class Member(Protocol):
    """What the system asks of an actor."""

    name: str

    @property
    def num_waiting(self) -> int:
        """Messages in the mailbox."""
        ...

    def start(self) -> None:
        """The loop runs."""
        ...

    async def close(self) -> None:
        """The end."""
        ...

    def run_burst(self) -> None:
        """Handle what waits, within limits."""
        ...


class ActorCrashed(Exception):
    """Why the broker stops. actor: its name. last_message: the type name of the message in hand, or
    of the callback.
    """

    def __init__(self, actor: str, last_message: str, cause: BaseException) -> None:
        super().__init__(
            f"actor {actor} crashed at {last_message}: {type(cause).__name__}: {cause}"
        )
        self.actor = actor
        self.last_message = last_message
        self.cause = cause


class ActorSystem:
    """All actors of one process. The first crash decides; `crashed` resolves to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.spin = LoopSpin(loop)
        self.crashed: asyncio.Future[ActorCrashed] = loop.create_future()
        self._actors: list[Member] = []
        self._ready: deque[Member] = deque()  # each once, in the order of their first message
        self._is_in_turn = False
        self._is_scheduled = False

    def add(self, actor: Member) -> None:
        """Called by `Actor.__init__`; the order of construction is the order of `start`."""
        self._actors.append(actor)

    def start(self) -> None:
        """Start every actor. An exception here is the caller's: nothing runs yet that could be
        lost.
        """
        for actor in self._actors:
            actor.start()

    async def stop(self) -> None:
        """Stop the actors, the last started first: doors stop before the ledger, the ledger before
        the link.
        """
        for actor in reversed(self._actors):
            await actor.close()

    def make_ready(self, actor: Member) -> None:
        """The actor has messages: its burst comes when those before it are done."""
        self._ready.append(actor)
        if not self._is_scheduled and not self._is_in_turn:
            self._is_scheduled = True
            self.loop.call_soon(self._run_scheduled)

    def run_ready(self) -> None:
        """The bursts of all actors that have messages, and of those that get some by it, within
        limits. Only for what the loop itself calls: never within a burst.
        """
        ready = self._ready
        if self._is_in_turn or not ready:
            return
        self._is_in_turn = True
        end_s = time.monotonic() + BURST_S
        for _ in range(TURN_BURSTS):
            ready.popleft().run_burst()
            if not ready or time.monotonic() > end_s:
                break
        self._is_in_turn = False
        if ready and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._is_scheduled = False
        self.run_ready()

    def report(self, crash: ActorCrashed) -> None:
        """Record a crash once and log it with its traceback."""
        log.error(
            "actor.crashed",
            actor=crash.actor,
            last_message=crash.last_message,
            error=str(crash.cause),
            exc_info=crash.cause,
        )
        if not self.crashed.done():
            self.crashed.set_result(crash)

    def mailbox_lengths(self) -> dict[str, int]:
        """Messages waiting per actor, for metrics."""
        return {actor.name: actor.num_waiting for actor in self._actors}
