"""Answers, events and releases on their way to the doors: one `Publish` a door and burst, in order.

They wait until the burst has started its runs, so that the engine hears of a job before its client.
"""

from __future__ import annotations

from broker.messages import Accepted, Address, Event, Publish, Refused, Released


class Outbox:
    """Collects during a burst; `flush` sends."""

    def __init__(self) -> None:
        self._answers: list[tuple[Address, Accepted | Refused]] = []
        self._events: dict[Address, list[Event]] = {}
        self._released: dict[Address, list[tuple[str, int]]] = {}

    def answer(self, door: Address, answer: Accepted | Refused) -> None:
        """The answer to one `Submit`; goes out before all events."""
        self._answers.append((door, answer))

    def add(self, door: Address, event: Event) -> None:
        """One event for one door."""
        events = self._events.get(door)
        if events is None:
            self._events[door] = [event]
        else:
            events.append(event)

    def release(self, door: Address, job: str, attempt: int) -> None:
        """Hand a job back to its door, without an event."""
        self._released.setdefault(door, []).append((job, attempt))

    def flush(self) -> None:
        """Send everything."""
        if self._answers:
            for door, answer in self._answers:
                door.tell(answer)
            self._answers = []
        if self._events:
            for door, events in self._events.items():
                door.tell(Publish(events))
            self._events = {}
        if self._released:
            for door, jobs in self._released.items():
                door.tell(Released(jobs))
            self._released = {}
