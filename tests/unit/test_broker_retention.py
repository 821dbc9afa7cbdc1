"""How long ended streams stay: until they were told, and retain_ms or retain_jobs more."""

from __future__ import annotations

import time
from typing import Any

import pytest

from broker.gateway.sessions import Client, Peer
from broker.gateway.shared import MAX_WAITING, check_backlog
from broker.gateway.stream import Stream
from broker.gateway.table import StreamTable
from broker.messages import Done, Usage
from tokenbus.errors import Busy


class Nobody:
    """Takes every message."""

    def tell(self, message: object) -> bool:
        return True


class Shelf:
    """A table that keeps two told streams for a second, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        monkeypatch.setattr("broker.gateway.table.time.monotonic", lambda: self.now_s)
        self.table = StreamTable(retain_ms=1_000, retain_jobs=2, has_keys=False)
        self.client = Client("c")
        self.come()

    def come(self) -> None:
        """The client begins a session."""
        self.client.begin_session(Peer(b"p", 0.0), 1, "", self.now_s)

    def ended(self, job: str, **facts: Any) -> Stream:
        """A stream that has ended."""
        stream = Stream(job, self.client, None, "", Nobody())
        self.table.add(stream)
        self.table.end(stream, Done(job, 1, 0, "length", "", Usage(1, 0, 0, 0.0, 0.0, 0.0), 0))
        for name, value in facts.items():
            setattr(stream, name, value)
        return stream

    def kept(self) -> list[str]:
        """What a sweep leaves."""
        self.table.forget_old()
        return [job for job in "abcdef" if self.table.get(job) is not None]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(monkeypatch)


def test_what_was_not_told_stays_however_many_others_end_and_however_long(shelf: Shelf) -> None:
    shelf.ended("a")
    for job in "bcde":
        shelf.ended(job, terminal_sent=True)
    assert shelf.kept() == ["a", "d", "e"]
    shelf.now_s += 0.9
    assert shelf.kept() == ["a", "d", "e"]
    shelf.now_s += 0.2
    assert shelf.kept() == ["a"]
    assert shelf.table.num_open == 0


def test_retention_begins_when_the_end_was_told(shelf: Shelf) -> None:
    stream = shelf.ended("a")
    shelf.now_s += 60
    stream.terminal_sent = True
    assert shelf.kept() == ["a"]
    shelf.now_s += 1.1
    assert shelf.kept() == []


def test_a_stream_that_is_told_once_more_stays_until_it_is_told(shelf: Shelf) -> None:
    stream = shelf.ended("a", terminal_sent=True)
    assert shelf.kept() == ["a"]
    stream.restart()
    shelf.now_s += 60
    assert shelf.kept() == ["a"]
    stream.terminal_sent = True
    assert shelf.kept() == ["a"]
    shelf.now_s += 1.1
    assert shelf.kept() == []


def test_a_client_that_comes_back_has_its_time_to_resume(shelf: Shelf) -> None:
    streams = [shelf.ended(job) for job in "abc"]
    shelf.now_s += 60
    shelf.come()
    shelf.now_s += 0.9
    assert shelf.kept() == ["a", "b", "c"]
    shelf.table.attach(streams[0], shelf.client)
    shelf.now_s += 0.2
    assert shelf.kept() == ["a"]


def test_the_streams_of_a_client_that_is_gone_count_as_told(shelf: Shelf) -> None:
    for job in "abc":
        shelf.ended(job)
    shelf.client.is_gone = True
    assert shelf.kept() == ["b", "c"]
    shelf.now_s += 1.1
    assert shelf.kept() == []


def test_a_client_that_takes_nothing_may_not_ask_for_ever_more(shelf: Shelf) -> None:
    stream = shelf.ended("a")
    check_backlog(shelf.client)
    shelf.client.waiting.update((str(i), stream) for i in range(MAX_WAITING))
    with pytest.raises(Busy):
        check_backlog(shelf.client)
