"""What the gateway asks of text and ledger, without either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from broker.gateway.jobs import Jobs
from broker.gateway.router import Sent
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, Peer
from broker.gateway.shared import Wiring
from broker.gateway.stream import Stream, StreamState
from broker.gateway.table import StreamTable
from broker.messages import (
    Accepted,
    Cancel,
    Drop,
    Find,
    Found,
    Pause,
    Prepare,
    Prepared,
    Publish,
    Refused,
    Released,
    Submit,
    SubmitDurable,
    Tokens,
    Unpause,
)
from broker.ring.records import Sampling
from broker.text.vocabulary import letters
from tests.unit.broker_kit import Mailbox
from tokenbus.errors import Busy, Conflict, Unsupported
from tokenbus.request import JobRequest


class Wire:
    """A router that takes everything."""

    def send(self, peer: bytes, frames: list[bytes]) -> Sent:
        return Sent.OK


class Desk:
    """Jobs with one client; the test answers for text and ledger."""

    def __init__(self) -> None:
        self.door, self.text, self.ledger = Mailbox(), Mailbox(), Mailbox()
        sender = Sender(Wire(), 100)  # type: ignore[arg-type]
        table = StreamTable(60_000, 10, has_keys=False)
        wiring = Wiring(self.door, self.text, self.ledger)
        self.jobs = Jobs(table, letters(26), wiring, sender)
        self.relay = Mailbox()
        self.jobs.connect_relay(self.relay)
        self.client = self.join("c")

    def prepare(self) -> None:
        """SUBMIT, up to the ledger's mailbox."""
        self.jobs.submit(self.client, JobRequest(job="j", prompt="x"))
        self.answer_for_text()

    def answer_for_text(self) -> None:
        asked = self.text.messages[-1]
        assert isinstance(asked, Prepare)
        ids = np.array([1], np.int32)
        self.tell(Prepared(asked.request, ids, Sampling(), (), 10, 0, asked.context))
        assert isinstance(self.ledger.messages[-1], Submit)

    def tell(self, message: object) -> None:
        self.jobs.handlers[type(message)](message)

    def join(self, name: str) -> Client:
        client = Client(name)
        client.begin_session(Peer(name.encode(), 0.0), 1_000, "", 0.0)
        return client

    def follow_by_name(self, tenant: str = "") -> Stream:
        """RESUME of a job that only Redis knows."""
        self.jobs.resume(self.client, "j", 0)
        question = self.relay.messages[-1]
        assert isinstance(question, Find)
        self.tell(Found("j", question.context, {"tenant": tenant}, 3))
        return self.client.streams["j"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancel_names_the_door_whose_job_it_means(is_late: bool) -> None:
    desk = Desk()
    desk.prepare()
    if is_late:
        desk.jobs.cancel(desk.client, "j")
        assert isinstance(desk.ledger.messages[-1], Submit)  # not before its answer
    desk.tell(Accepted("j", 1, 5, 1))
    if not is_late:
        desk.jobs.cancel(desk.client, "j")
    assert desk.ledger.messages[-1] == Cancel("j", door=desk.door)


def test_pause_and_the_end_of_a_client_name_the_door_too() -> None:
    desk = Desk()
    desk.prepare()
    desk.tell(Accepted("j", 1, 5, 1))
    stream = desk.client.streams["j"]
    desk.jobs.on_backlog(stream, True)
    desk.jobs.on_backlog(stream, False)
    desk.jobs.abandon(desk.client)
    kinds = (Pause, Unpause, Cancel)
    assert desk.ledger.messages[-3:] == [kind("j", door=desk.door) for kind in kinds]


def test_a_key_that_nobody_would_keep_is_refused() -> None:
    desk = Desk()
    with pytest.raises(Unsupported) as refused:
        desk.jobs.submit(desk.client, JobRequest(job="j", prompt="x", idempotency_key="k"))
    assert refused.value.field == "idempotency_key"
    assert not desk.text.messages


def test_what_comes_late_for_an_earlier_job_of_that_id_is_not_taken_for_this_one() -> None:
    """A durable job had the id until its client left; what the relay had said is still coming."""
    desk = Desk()
    desk.follow_by_name()
    desk.jobs.abandon(desk.client)
    assert desk.relay.messages[-1] == Drop("j")
    desk.jobs.submit(desk.client, JobRequest(job="j", prompt="x"))
    stream = desk.client.streams["j"]
    late = (
        Accepted("j", 1, 7, 1),
        Publish([Tokens("j", 1, 1, (5,), "f")]),
        Refused("j", Busy("late", retry_ms=1)),
    )
    for message in late:
        desk.tell(message)
    assert (stream.state, stream.last_seq) == (StreamState.PREPARING, 0)
    desk.answer_for_text()
    desk.tell(Refused("j", Busy("late", retry_ms=1), attempt=2))
    desk.tell(Accepted("j", 1, 5, 1))
    assert stream.state is StreamState.LIVE
    desk.tell(Released([("j", 2)]))
    assert stream.state is StreamState.LIVE
    desk.tell(Released([("j", 1)]))
    assert stream.state is StreamState.ENDED


def test_a_submit_under_the_name_of_a_followed_job_drops_what_is_followed() -> None:
    desk = Desk()
    desk.follow_by_name()
    other = desk.join("d")
    desk.jobs.submit(other, JobRequest(job="j", prompt="x", durable=True))
    assert [type(message) for message in desk.relay.messages[-2:]] == [Drop, SubmitDurable]
    assert other.streams["j"].others == {desk.client: None}  # who hears the end


@pytest.mark.parametrize("request_of", [{"durable": False}, {"durable": True, "tenant": "b"}])
def test_a_job_that_is_followed_by_name_is_no_other_request(request_of: dict[str, Any]) -> None:
    desk = Desk()
    stream = desk.follow_by_name(tenant="a")
    with pytest.raises(Conflict):
        desk.jobs.submit(desk.join("d"), JobRequest(job="j", prompt="x", **request_of))
    assert desk.client.streams["j"] is stream
