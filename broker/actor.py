"""The actor: one bounded mailbox, private state, typed messages handled in bursts on the broker's
event loop.

Knows mailboxes, periodic work and crashes; knows no job and no socket. How to write one:

    class Clock(Actor):
        def __init__(self, system: ActorSystem) -> None:
            super().__init__(system, "clock", capacity=1024, overflow=Overflow.REFUSE)

        def start(self) -> None:                # the loop runs: open sockets, readers, timers
            self.every(1.0, self._tick)

        def handle(self, message: object) -> None:   # one message; never blocks, never awaits
            ...

        async def stop(self) -> None:           # flush and close; once, in reverse order of start
            ...

`tell` is safe to call from any code on the loop; it never runs the receiver at once, so an actor
is never re-entered. Messages wait in the mailbox until the caller has returned to the loop and are
then handled in one burst, followed by one `after_burst`: the place to flush what the burst produced
(one pipeline, one message a client). Actors with messages take turns within one turn of the loop: a
message that goes through four actors does not wait for the sockets four times. What happens when
the mailbox is full is part of the actor's contract (`Overflow`).

Work that awaits goes through `spawn`; callbacks that the loop calls (readers, timers) go through
`guard`, `every` or `later`. An exception in any of them is a crash of the actor: the report names
the actor and the type of the last message, and the whole broker goes down with a non-zero exit,
because a ledger without its doors is worth nothing. The supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, TypeVar

from broker.actor_system import BURST_S, ActorCrashed, ActorSystem

__all__ = ["Actor", "ActorCrashed", "ActorSystem", "MailboxFull", "Overflow"]

T = TypeVar("T")

# After so many messages, or BURST_S, others get a turn: sockets and other actors are served.
BURST_MESSAGES = 1024


class Overflow(Enum):
    """What a full mailbox does with one more message."""

    # `tell` returns False and keeps nothing; the sender answers for it (busy, retry)
    REFUSE = "refuse"
    # losing it would break a promise and its senders are bounded elsewhere: stop the broker
    CRASH = "crash"


class MailboxFull(RuntimeError):
    """A mailbox with the policy CRASH overflowed."""


class Actor(ABC):
    """Base of the broker's actors. Subclasses give `handle`, and `start`, `after_burst`, `stop`
    where they need them.
    """

    def __init__(
        self,
        system: ActorSystem,
        name: str,
        *,
        capacity: int = 65_536,
        overflow: Overflow = Overflow.CRASH,
    ) -> None:
        self.name = name
        self.system = system
        self.capacity = capacity
        self.overflow = overflow
        self.is_closed = False
        self._loop = system.loop
        self._mailbox: deque[object] = deque()
        self._is_ready = False
        self._last_message = "start"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        system.add(self)

    # ------------------------------------------------------------ for subclasses

    def start(self) -> None:
        """The loop runs; open what the actor needs. Nothing by default."""

    @abstractmethod
    def handle(self, message: object) -> None:
        """Take one message. Must not block."""

    def after_burst(self) -> None:
        """Flush what a burst of messages produced. Nothing by default."""

    async def stop(self) -> None:
        """Flush and close; no message comes after it. Nothing by default."""

    # ------------------------------------------------------------ for everybody

    @property
    def num_waiting(self) -> int:
        """Messages in the mailbox."""
        return len(self._mailbox)

    def tell(self, message: object) -> bool:
        """Put one message into the mailbox. Returns False if it was not kept (full, or the actor is
        closed).
        """
        if self.is_closed:
            return False
        if len(self._mailbox) >= self.capacity:
            if self.overflow is Overflow.REFUSE:
                return False
            self._crash(MailboxFull(f"mailbox of {self.name} holds {self.capacity} messages"))
            return False
        self._mailbox.append(message)
        if not self._is_ready:
            self._is_ready = True
            self.system.make_ready(self)
        return True

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine for the actor's life. An exception in it crashes the actor; it is
        cancelled at close.
        """
        task = self._loop.create_task(work, name=f"{self.name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a loop callback (reader, timer): an exception in it crashes the actor, and nothing
        runs after close. The messages that it sends are handled right after it.
        """
        run_ready = self.system.run_ready

        def guarded(*args: object) -> None:
            if self.is_closed:
                return
            try:
                callback(*args)
            except Exception as error:  # noqa: BLE001  a crash report follows, nothing is swallowed
                self._last_message = callback.__name__
                self._crash(error)
            run_ready()

        return guarded

    def later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call once after delay_s; cancelled at close."""

        def fire() -> None:
            self._timers.discard(handle)
            guarded()

        guarded = self.guard(callback)
        handle = self._loop.call_later(delay_s, fire)
        self._timers.add(handle)
        return handle

    def cancel_timer(self, handle: asyncio.TimerHandle) -> None:
        """Undo a `later` that has not fired."""
        handle.cancel()
        self._timers.discard(handle)

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Call each period_s until close; late turns are not made up for."""

        def fire() -> None:
            callback()
            self.later(period_s, fire)

        fire.__name__ = callback.__name__
        self.later(period_s, fire)

    async def close(self) -> None:
        """Hand the remaining messages to the actor, stop it, then cancel its tasks and timers.
        Idempotent.
        """
        if self.is_closed:
            return
        while self._mailbox and not self.system.crashed.done():
            self.run_burst()
        try:
            await self.stop()
        except Exception as error:  # noqa: BLE001  a crash report follows, nothing is swallowed
            self._last_message = "stop"
            self._crash(error)
        self.is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ inside

    def run_burst(self) -> None:
        """Handle what waits, within limits. Only for the actor system, and at close."""
        self._is_ready = False
        if self.is_closed or self.system.crashed.done():
            return
        mailbox, handle = self._mailbox, self.handle
        message: object = None
        try:
            num_messages = min(len(mailbox), BURST_MESSAGES)
            end_s = time.monotonic() + BURST_S if num_messages > 8 else 0.0
            for count in range(num_messages):
                if count and not count & 7 and time.monotonic() > end_s:
                    break
                message = mailbox.popleft()
                handle(message)
            self.after_burst()
        except Exception as error:  # noqa: BLE001  a crash report follows, nothing is swallowed
            self._last_message = type(message).__name__
            self._crash(error)
            return
        if mailbox and not self._is_ready:
            self._is_ready = True
            self.system.make_ready(self)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._last_message = task.get_name()
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        self.system.report(ActorCrashed(self.name, self._last_message, error))
