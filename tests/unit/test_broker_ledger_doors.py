"""How many jobs the ledger wants from a door that fetches them, whatever the other one brings."""

from __future__ import annotations

from broker.link_messages import RingState
from broker.messages import Accepted, Refused
from broker.ring.records import Finish
from tests.unit.test_broker_ledger import ENGINE, Bench, submit


async def test_the_door_is_told_how_many_jobs_are_wanted() -> None:
    b = Bench()
    await b.submit("a")
    await b.tell(ENGINE)
    await b.tell(RingState(is_full=True))
    await b.tell(RingState(is_full=False))
    await b.step({"a": 1}, a=Finish.LENGTH)
    await b.crash()
    assert b.fetcher.slots == [0, 7, 0, 7, 8, 0]
    assert b.door.slots == []


async def test_a_flood_at_one_door_leaves_places_for_the_jobs_of_the_other() -> None:
    b = Bench(max_queued=20)
    await b.tell(ENGINE)
    await b.submit(*(f"j{i:02}" for i in range(30)))
    assert any(isinstance(answers[0], Refused) for answers in b.door.answers.values())
    assert b.fetcher.slots[-1] == 4  # as many as there are rows
    await b.tell(*(submit(f"r{i}", b.fetcher, priority="high") for i in range(3)))
    assert isinstance(b.fetcher.answers["r0"][0], Accepted)  # although the queue is full
    assert b.fetcher.slots[-1] == 1
    await b.step({"j00": 1}, j00=Finish.LENGTH)
    assert "r0" in await b.running()
    await b.step({"r0": 1}, r0=Finish.LENGTH)
    assert b.fetcher.slots[-1] == 2
    await b.tell(RingState(is_full=True))
    assert b.fetcher.slots[-1] == 0


async def test_a_job_does_not_wait_behind_the_backlog_of_its_tenants_other_door() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit(*(f"j{i:02}" for i in range(12)))
    await b.tell(submit("r", b.fetcher))
    await b.step({"j00": 1}, j00=Finish.LENGTH)
    await b.step({"j01": 1}, j01=Finish.LENGTH)
    assert "r" in await b.running()
