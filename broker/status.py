"""What the broker reports to its supervisor: one JSON object a line on an inherited descriptor.

`listening` (doors are open), `progress` (the engine loads), `ready` (engine and doors are, with
every address), `not_ready` (why), `draining` (why), `drained`. Knows no job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

import structlog

from broker.link_messages import EngineGone, EngineProgress, EngineUp
from broker.messages import DoorStatus, Drain

log = structlog.get_logger("broker")

LOADING = "the engine is loading"
ENGINE_LOST = "the engine is gone"


class Monitor:
    """An address for the reports of engine link and doors.

    fd: where the lines go; None: nowhere. on_drain: called when a door passes on a wish to drain.
    """

    def __init__(self, fd: int | None, on_drain: Callable[[], None]) -> None:
        self._fd = fd
        self._on_drain = on_drain
        self._addresses: dict[str, object] = {}
        self._engine: dict[str, object] = {}
        self._troubles = {"engine": LOADING}
        self._said: str | None = None  # the last reason reported; "" is ready
        self.is_stopping = False  # from then on nothing is news
        self.is_draining = False

    @property
    def reason(self) -> str:
        """Why the worker takes no jobs; empty if it does. May be read from any thread."""
        if self.is_draining:
            return "broker: is draining"
        return "; ".join(f"{name}: {why}" for name, why in list(self._troubles.items()))

    def expect(self, door: str) -> None:
        """This door must report that it is ready before the worker is."""
        self._troubles[door] = "is starting"

    def listening(self, addresses: Mapping[str, object]) -> None:
        """The doors are open; addresses: what `ready` repeats."""
        self._addresses = dict(addresses)
        self.write("listening", self._addresses)

    def tell(self, message: object) -> bool:
        """See `broker.messages.Address`."""
        if isinstance(message, EngineProgress):
            self.write("progress", message.info)
        elif isinstance(message, Drain):
            self._on_drain()
        else:
            self._note(message)
            self._report()
        return True

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        """One line. A supervisor that is gone is not the broker's fault."""
        if self._fd is None:
            return
        line = json.dumps({**facts, "event": event}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except BrokenPipeError:
            self._fd = None

    def _note(self, message: object) -> None:
        if isinstance(message, EngineUp):
            self._engine = message.info
            self._troubles.pop("engine", None)
        elif isinstance(message, EngineGone):
            self._troubles["engine"] = ENGINE_LOST
        elif isinstance(message, DoorStatus):
            if message.ready:
                self._troubles.pop(message.door, None)
            else:
                self._troubles[message.door] = message.reason or "is not ready"

    def _report(self) -> None:
        """Say it if readiness, or the reason against it, changed."""
        reason = "; ".join(f"{name}: {why}" for name, why in self._troubles.items())
        if reason == self._said or self.is_stopping:
            return
        is_start, self._said = self._said is None, reason
        if reason:
            if is_start:  # what it waits for
                log.info("broker.not_ready", reason=reason)
            else:
                log.warning("broker.not_ready", reason=reason)
            self.write("not_ready", {"reason": reason})
        else:
            log.info("broker.ready", **self._addresses)
            self.write("ready", {**self._addresses, "engine": self._engine})
