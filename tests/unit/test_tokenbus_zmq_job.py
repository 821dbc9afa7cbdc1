"""When a job on a ZeroMQ connection asks for its tokens again, and when it gives up."""

from __future__ import annotations

import asyncio

import pytest

import tokenbus.zmq_job
from tokenbus.bodies import Accepted
from tokenbus.errors import ProtocolError
from tokenbus.events import Tokens
from tokenbus.protocol import MessageType as T
from tokenbus.request import JobRequest
from tokenbus.stream import Job
from tokenbus.zmq_job import MAX_RESUMES, ZmqJob

MANY = 4 * MAX_RESUMES


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tick comes as if a second had gone by."""
    monkeypatch.setattr(tokenbus.zmq_job, "RESUME_AGAIN_S", 0.0)


class Line:
    """A follower of job `j`, and what it sent."""

    def __init__(self, request: JobRequest | None = None) -> None:
        self.sent: list[tuple[T, dict[str, object]]] = []
        self.follower = ZmqJob(Job("j", request), lambda kind, body, _: self.send(kind, body))

    def send(self, kind: T, body: dict[str, object]) -> None:
        self.sent.append((kind, body))

    def tokens(self, seq: int) -> None:
        self.follower.on_tokens(Tokens("j", 1, seq, (seq,), "x"))

    @property
    def resumes(self) -> list[object]:
        """The position of each RESUME."""
        return [body["after"] for kind, body in self.sent if kind is T.RESUME]


async def test_a_job_that_waits_is_resumed_once_after_a_reconnect_and_waited_for() -> None:
    line = Line(JobRequest("j", prompt="p"))
    line.follower.submit()
    line.follower.on_accepted(Accepted("j", 1, 7, 1, 0), "w")
    line.follower.pick_up(is_same_worker=True)
    for _ in range(MANY):
        line.follower.on_tick()
    assert line.resumes == [0]
    assert not line.follower.job.is_over
    line.tokens(1)
    assert [event.ids for event in line.follower.job.pending] == [(1,)]


async def test_a_tail_of_a_job_that_waits_is_patient() -> None:
    line = Line()
    line.follower.resume()
    for _ in range(MANY):
        line.follower.on_tick()
    assert line.resumes == [0]
    assert not line.follower.job.is_over


async def test_reconnects_of_a_job_that_waits_are_not_counted() -> None:
    line = Line()
    for _ in range(MANY):
        line.follower.pick_up(is_same_worker=True)
    assert line.resumes == [0] * MANY
    assert not line.follower.job.is_over


async def test_a_hole_that_is_never_filled_ends_the_job() -> None:
    line = Line()
    line.tokens(3)
    for _ in range(MANY):
        line.follower.on_tick()
    assert line.resumes == [0] * MAX_RESUMES
    assert isinstance(line.follower.job.error, ProtocolError)


async def test_a_hole_found_after_a_reconnect_is_asked_for_until_it_is_filled() -> None:
    line = Line()
    line.tokens(1)
    line.follower.pick_up(is_same_worker=True)
    line.tokens(4)
    for _ in range(MAX_RESUMES - 1):
        line.follower.on_tick()
    line.tokens(2)
    num_before = len(line.resumes)
    for _ in range(MANY):
        line.follower.on_tick()
    assert len(line.resumes) == num_before == MAX_RESUMES + 1
    assert not line.follower.job.is_over


async def test_a_refused_resume_is_repeated_as_long_as_the_worker_answers() -> None:
    line = Line()
    line.tokens(3)
    for count in range(1, MANY + 1):
        line.follower.on_busy(1)
        line.follower.on_tick()
        assert len(line.resumes) == count  # not before its time
        async with asyncio.timeout(10):
            while len(line.resumes) == count:
                await asyncio.sleep(0)
    assert len(line.resumes) == MANY + 1
    assert not line.follower.job.is_over
    line.tokens(1)
    for _ in range(MANY):
        line.follower.on_tick()
    assert len(line.resumes) == MANY + 1
