"""Durable jobs at the ZeroMQ door: what the relay says, however late, is one gapless stream."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from broker.gateway.durable import DurableJobs
from broker.gateway.relayed import RelayedStream
from broker.gateway.router import Sent
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, Peer
from broker.gateway.stream import StreamState
from broker.gateway.table import StreamTable
from broker.messages import (
    Accepted,
    Cancel,
    Done,
    Drop,
    Failed,
    Find,
    Follow,
    Found,
    SubmitDurable,
    Tokens,
    Usage,
)
from tests.unit.broker_kit import Mailbox
from tokenbus.errors import Busy, Gone, InvalidField, TokenbusError, Unsupported
from tokenbus.protocol import MessageType as T
from tokenbus.request import JobRequest

REQUEST = JobRequest(job="j", prompt="x", durable=True)


class Wire:
    """A router that takes everything."""

    def __init__(self) -> None:
        self.sent: list[tuple[T, dict[str, Any]]] = []

    def send(self, peer: bytes, frames: list[bytes]) -> Sent:
        self.sent.append((T(frames[0][3]), msgpack.unpackb(frames[1])))
        return Sent.OK


class Door:
    """DurableJobs with one client in front and a relay behind."""

    def __init__(self, *, has_keys: bool = False, tenant: str = "") -> None:
        self.wire, self.relay = Wire(), Mailbox()
        self.sender = Sender(self.wire, 1_000)  # type: ignore[arg-type]
        self.table = StreamTable(60_000, 10, has_keys)
        self.jobs = DurableJobs(self.table, self.sender, Mailbox(), self.relay)
        self.rejected: list[TokenbusError] = []
        self.jobs.on_reject = lambda _, error: self.rejected.append(error)
        self.client = Client("c")
        self.client.begin_session(Peer(b"p", 0.0), 1_000, tenant, 0.0)

    def submit(self) -> RelayedStream:
        self.jobs.submit(self.client, REQUEST)
        return self.stream()

    def also_asked_by(self, stream: RelayedStream) -> Client:
        """Another client that asks for the same job from its beginning."""
        other = Client("d")
        other.begin_session(Peer(b"q", 0.0), 1_000, "", 0.0)
        self.jobs.rewind(stream, other, 0)
        return other

    def stream(self) -> RelayedStream:
        stream = self.table.get("j")
        assert isinstance(stream, RelayedStream)
        return stream

    def event(self, *events: Tokens | Done | Failed) -> None:
        for event in events:
            self.jobs.on_event(self.stream(), event)
        self.sender.flush_batch()
        self.sender.flush_client(self.client)

    def found(self, **facts: Any) -> None:
        """The relay's answer to the last question."""
        question = self.relay.messages[-1]
        assert isinstance(question, Find)
        self.jobs.handlers[Found](Found("j", question.context, **facts))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        sent, self.wire.sent = self.wire.sent, []
        return [(kind.name, body) for kind, body in sent]

    def rows(self) -> list[list[Any]]:
        return [row for _, body in self.take() for row in body.get("events", ())]


def tokens(seq: int, *ids: int) -> Tokens:
    return Tokens("j", 1, seq, ids, "".join(chr(97 + i) for i in ids))


def done(seq: int) -> Done:
    return Done("j", 1, seq, "length", "", Usage(1, seq, 0, 0.0, 0.0, 0.0), 7)


def test_a_job_goes_to_redis_and_its_events_to_the_client() -> None:
    door = Door()
    stream = door.submit()
    assert isinstance(door.relay.messages[0], SubmitDurable)
    assert door.take() == []  # not accepted before a worker has it
    door.jobs.on_accepted(stream, Accepted("j", 1, 5, 3))
    door.event(tokens(1, 0, 1), tokens(3, 2), done(3))
    names = [name for name, _ in door.take()]
    assert names == ["ACCEPTED", "TOKENS", "DONE"]


def test_what_was_on_its_way_before_a_resume_is_told_once() -> None:
    door = Door()
    stream = door.submit()
    door.event(tokens(1, 0), tokens(2, 1))
    door.take()
    door.jobs.rewind(stream, door.client, 1)
    assert door.relay.messages[-1] == Follow("j", door.jobs._door, 1)
    door.event(tokens(3, 2), done(3))  # still of the old reading: seq 2 is missing before it
    assert door.take() == []
    door.event(tokens(2, 1), tokens(3, 2), done(3))
    rows = door.take()
    assert [body["events"] for name, body in rows if name == "TOKENS"] == [
        [["j", 1, 2, [1], "b"], ["j", 1, 3, [2], "c"]]
    ]
    assert [name for name, _ in rows].count("DONE") == 1


def test_an_ended_job_is_told_again_from_the_start() -> None:
    door = Door()
    stream = door.submit()
    door.event(tokens(1, 0), done(1))
    assert door.table.num_open == 0
    door.take()
    door.jobs.rewind(stream, door.client, 0)
    assert door.table.num_open == 1
    door.event(tokens(1, 0), done(1))
    assert [name for name, _ in door.take()] == ["TOKENS", "DONE"]
    assert door.table.num_open == 0


def test_a_failure_before_any_worker_took_the_job_is_a_rejection() -> None:
    door = Door()
    stream = door.submit()
    error = InvalidField("prompt: no", field="prompt")
    door.jobs.on_event(stream, Failed("j", 1, 0, error))
    assert door.rejected == [error]


def test_resume_from_within_an_entry_or_beyond_the_end_is_gone() -> None:
    door = Door()
    door.jobs.look_up(door.client, "j", T.RESUME, 2)
    door.found(fields={"state": "running"}, seq=3)
    door.event(tokens(1, 0, 1, 2))  # ends after seq 2, begins before it
    assert [(name, body["code"]) for name, body in door.take()] == [("ERROR", "gone")]
    assert door.table.get("j") is None
    assert door.relay.messages[-1] == Drop("j")
    door.jobs.look_up(door.client, "j", T.RESUME, 4)
    door.found(fields={"state": "running"}, seq=3)
    assert [body["code"] for _, body in door.take()] == ["gone"]
    assert door.table.get("j") is None


def test_cancel_of_a_job_that_only_redis_knows_brings_its_end() -> None:
    door = Door()
    door.jobs.look_up(door.client, "j", T.CANCEL)
    door.found(fields={"state": "running"}, seq=9)
    assert door.relay.messages[-1] == Cancel("j")
    door.event(done(9))
    assert [name for name, _ in door.take()] == ["DONE"]


def test_a_session_that_only_cancels_hears_the_end() -> None:
    door = Door()
    stream = door.submit()
    door.event(tokens(1, 0), tokens(2, 1))
    door.jobs.listen(stream)
    assert isinstance(door.relay.messages[-1], SubmitDurable)  # it hears it already
    door.client.begin_session(Peer(b"q", 0.0), 1_000, "", 0.0)
    door.take()
    door.jobs.listen(stream)
    assert door.relay.messages[-1] == Follow("j", door.jobs._door, 2)
    door.event(done(2))
    assert [name for name, _ in door.take()] == ["DONE"]


def test_an_unknown_job_and_a_redis_that_is_away_are_told_apart() -> None:
    door = Door()
    for facts, code in (({}, "not_found"), ({"error": Busy("away")}, "busy")):
        door.jobs.look_up(door.client, "j", T.STATS)
        door.found(**facts)
        assert [body["code"] for _, body in door.take()] == [code]


@pytest.mark.parametrize(("tenant", "answer"), [("red", "STATS"), ("blue", "ERROR")])
def test_with_keys_only_its_tenant_finds_a_job(tenant: str, answer: str) -> None:
    door = Door(has_keys=True, tenant=tenant)
    door.jobs.look_up(door.client, "j", T.STATS)
    door.found(fields={"state": "running", "attempt": "2", "tenant": "red"}, seq=4)
    ((name, body),) = door.take()
    assert name == answer
    assert body.get("code") == ("not_found" if answer == "ERROR" else None)


def test_a_client_that_leaves_lets_the_job_run() -> None:
    door = Door()
    stream = door.submit()
    stream.state = StreamState.LIVE
    door.jobs.abandon(stream)
    assert door.relay.messages[-1] == Drop("j")
    assert door.table.get("j") is None


def test_have_is_refused_and_nobody_can_be_ahead_of_the_log() -> None:
    door = Door()
    with pytest.raises(Unsupported):
        door.jobs.submit(door.client, JobRequest("j", prompt="x", durable=True, have=(1,)))
    stream = door.submit()
    with pytest.raises(Gone):
        door.jobs.rewind(stream, door.client, 1)


def test_what_was_sent_is_not_kept() -> None:
    door = Door()
    stream = door.submit()
    door.event(*(tokens(seq, 1) for seq in range(1, 101)))
    assert (stream.base_seq, stream.last_seq) == (100, 100)


def test_everybody_who_asked_for_a_waiting_job_is_answered_and_hears_its_end() -> None:
    door = Door()
    stream = door.submit()
    other = door.also_asked_by(stream)
    door.event(tokens(1, 0))
    door.event(done(1))
    door.sender.flush_client(other)
    names = [name for name, _ in door.take()]
    assert names == ["ACCEPTED", "ACCEPTED", "TOKENS", "DONE", "DONE"]


def test_a_job_of_a_client_that_leaves_is_told_to_who_asked_before() -> None:
    door = Door()
    stream = door.submit()
    other = door.also_asked_by(stream)
    door.event(tokens(1, 0))
    other.peer = None
    door.jobs.abandon(stream)
    door.take()
    assert isinstance(door.relay.messages[-1], Follow)
    door.event(tokens(1, 0), done(1))
    assert [name for name, _ in door.take()] == ["TOKENS", "DONE"]
