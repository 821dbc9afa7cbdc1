"""A job id that two doors or two attempts use: the ledger goes by which one is meant."""

from __future__ import annotations

from broker.messages import Cancel, Drain, Drop, Pause, Refused
from tests.unit.test_broker_ledger import ENGINE, Bench, Door


async def test_what_is_said_about_another_attempt_or_door_leaves_the_job_alone() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", attempt=2)
    for what in (Cancel, Drop, Pause):
        await b.tell(what("j", door=b.door, attempt=1), what("j", door=Door(), attempt=2))
    await b.step({"j": 1})
    assert (b.link.aborted, b.link.paused) == ([], [])
    await b.tell(Cancel("j", door=b.door, attempt=2))
    assert b.door.end("j").reason == "cancelled"  # type: ignore[union-attr]


async def test_answers_and_releases_name_the_attempt_they_are_about() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", attempt=2)
    await b.submit("j", attempt=1)  # of an owner that lost it: the answer must not hit attempt 2
    accepted, refused = b.door.answers["j"]
    assert isinstance(refused, Refused)
    assert (accepted.attempt, refused.attempt) == (2, 1)
    await b.tell(Drain(60_000))
    await b.submit("k", attempt=3)
    assert b.door.answers["k"][0].attempt == 3
    await b.ledger.close()
