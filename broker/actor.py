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
is never re-entered. Messages wait in the mailbox until the loop's next turn and are then handled in
one burst, followed by one `after_burst`: the place to flush what the burst produced (one pipeline,
one message a client). What happens when the mailbox is full is part of the actor's contract
(`Overflow`). Work that awaits goes through `spawn`; callbacks that the loop calls (readers, timers)
go through `guard`, `every` or `later`. An exception in any of them is a crash of the actor: the
report names the actor and the type of the last message, and the whole broker goes down with a
non-zero exit, because a ledger without its doors is worth nothing. The supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, TypeVar

import structlog

log = structlog.get_logger("broker.actor")

T = TypeVar("T")

# After so many messages, or so long, the loop gets a turn: sockets and other actors are served.
BURST_MESSAGES = 1024
BURST_S = 0.004


class Overflow(Enum):
    """What a full mailbox does with one more message."""

    # `tell` returns False and keeps nothing; the sender answers for it (busy, retry)
    REFUSE = "refuse"
    # losing it would break a promise and its senders are bounded elsewhere: stop the broker
    CRASH = "crash"


class MailboxFull(RuntimeError):
    """A mailbox with the policy CRASH overflowed."""


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
        self.crashed: asyncio.Future[ActorCrashed] = loop.create_future()
        self._actors: list[Actor] = []

    def add(self, actor: Actor) -> None:
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


class Actor:
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
        self._is_scheduled = False
        self._last_message = "start"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        system.add(self)

    # ------------------------------------------------------------ for subclasses

    def start(self) -> None:
        """The loop runs; open what the actor needs. Nothing by default."""

    def handle(self, message: object) -> None:
        """Take one message. Must not block."""
        raise NotImplementedError

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
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run_burst)
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
        runs after close.
        """

        def guarded(*args: object) -> None:
            if self.is_closed:
                return
            try:
                callback(*args)
            except Exception as error:  # noqa: BLE001  a crash report follows, nothing is swallowed
                self._last_message = callback.__name__
                self._crash(error)

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
            self._run_burst()
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

    def _run_burst(self) -> None:
        self._is_scheduled = False
        if self.is_closed or self.system.crashed.done():
            return
        mailbox, handle = self._mailbox, self.handle
        message: object = None
        try:
            end_s = time.monotonic() + BURST_S
            for count in range(min(len(mailbox), BURST_MESSAGES)):
                if not count & 7 and time.monotonic() > end_s:
                    break
                message = mailbox.popleft()
                handle(message)
            self.after_burst()
        except Exception as error:  # noqa: BLE001  a crash report follows, nothing is swallowed
            self._last_message = type(message).__name__
            self._crash(error)
            return
        if mailbox and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run_burst)

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
