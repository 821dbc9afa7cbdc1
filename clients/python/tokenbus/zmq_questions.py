"""CANCEL and STATS of a ZeroMQ connection that wait for the worker's word.

The answers name the job, not the question: what is said of a job answers everybody who asks for it.
A question is sent again after each WELCOME for as long as somebody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tokenbus.bodies import get_int, get_str
from tokenbus.errors import TokenbusError
from tokenbus.events import JobStatus
from tokenbus.protocol import MessageType

Question = tuple[MessageType, str]  # CANCEL or STATS, and the job


class Questions:
    """Who waits for which answer. Only the event loop's thread touches it."""

    def __init__(self) -> None:
        self._waiters: dict[Question, list[asyncio.Future[JobStatus]]] = {}

    def add(self, kind: MessageType, name: str) -> asyncio.Future[JobStatus]:
        """A new waiter, to be given to `remove` when it waits no more."""
        waiter: asyncio.Future[JobStatus] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault((kind, name), []).append(waiter)
        return waiter

    def remove(self, kind: MessageType, name: str, waiter: asyncio.Future[JobStatus]) -> None:
        """No effect on one that was answered."""
        waiters = self._waiters.get((kind, name), [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop((kind, name), None)

    def open(self) -> list[Question]:
        """What is to be asked again on a new session."""
        return list(self._waiters)

    def is_open(self, kind: MessageType, name: str) -> bool:
        """Whether somebody waits for this answer."""
        return (kind, name) in self._waiters

    def answer(self, kind: MessageType, status: JobStatus) -> None:
        """The worker said it."""
        for waiter in self._waiters.pop((kind, status.job), ()):
            if not waiter.done():
                waiter.set_result(status)

    def refuse(self, name: str, error: TokenbusError) -> None:
        """The worker cannot do or say it: both kinds of questions about the job fail."""
        for kind in (MessageType.CANCEL, MessageType.STATS):
            for waiter in self._waiters.pop((kind, name), ()):
                if not waiter.done():
                    waiter.set_exception(error)

    def fail_all(self, error: TokenbusError) -> None:
        """There is no worker to ask any more."""
        for _, name in self.open():
            self.refuse(name, error)


def status_from_body(body: Mapping[str, Any]) -> JobStatus:
    """What STATS says of a job. Raises BadFrame."""
    return JobStatus(
        job=get_str(body, "job"),
        state=get_str(body, "state"),
        attempt=get_int(body, "attempt", 0),
        seq=get_int(body, "seq", 0),
        worker=get_str(body, "worker", ""),
        reason=get_str(body, "reason", ""),
        code=get_str(body, "code", ""),
    )
