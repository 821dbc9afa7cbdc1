"""What the gateway asks of text and ledger, without either."""

from __future__ import annotations

import numpy as np
import pytest

from broker.gateway.jobs import Jobs
from broker.gateway.router import Sent
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client, Peer
from broker.gateway.shared import Wiring
from broker.gateway.table import StreamTable
from broker.messages import Accepted, Cancel, Pause, Prepare, Prepared, Submit, Unpause
from broker.ring.records import Sampling
from broker.text.vocabulary import letters
from tests.unit.broker_kit import Mailbox
from tokenbus.errors import Unsupported
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
        self.client = Client("c")
        self.client.begin_session(Peer(b"p", 0.0), 1_000, "", 0.0)

    def prepare(self) -> None:
        """SUBMIT, up to the ledger's mailbox."""
        self.jobs.submit(self.client, JobRequest(job="j", prompt="x"))
        asked = self.text.messages[-1]
        assert isinstance(asked, Prepare)
        ids = np.array([1], np.int32)
        self.tell(Prepared(asked.request, ids, Sampling(), (), 10, 0, asked.context))
        assert isinstance(self.ledger.messages[-1], Submit)

    def tell(self, message: object) -> None:
        self.jobs.handlers[type(message)](message)


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
