"""Jobs that another door sends through Redis: any worker runs them, the door sees them through."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker.messages import (
    Accepted,
    Cancel,
    Done,
    Event,
    Failed,
    Find,
    Follow,
    Found,
    Pause,
    Publish,
    Refused,
    SubmitDurable,
    Tokens,
    Unpause,
)
from tests.redis_proxy import RedisProxy
from tests.redis_servers import RedisServer
from tests.streams_kit import Bus, Worker, open_bus, text_of, until
from tokenbus.events import crc32_of_ids
from tokenbus.request import JobRequest, SamplingParams


@pytest.fixture
async def bus(shared_redis: RedisServer) -> AsyncIterator[Bus]:
    async with open_bus(shared_redis) as bus:
        yield bus


class OtherDoor:
    """Collects what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def tell(self, message: object) -> bool:
        self.messages.append(message)
        return True

    @property
    def events(self) -> list[Event]:
        batches = [message for message in self.messages if isinstance(message, Publish)]
        return [event for batch in batches for event in batch.events]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens))

    @property
    def end(self) -> Done | Failed | None:
        ends = [event for event in self.events if isinstance(event, Done | Failed)]
        assert len(ends) < 2, ends
        return ends[0] if ends else None


def request(job: str, max_tokens: int = 10) -> JobRequest:
    return JobRequest(job, prompt="hello", params=SamplingParams(max_tokens), durable=True)


async def test_a_durable_job_survives_the_worker_that_runs_it(bus: Bus) -> None:
    front = await bus.worker("front", max_jobs=0)
    first = await bus.worker("first")
    door = OtherDoor()
    front.door.tell(SubmitDurable(request("j"), door))
    await until(lambda: "j" in first.ledger.runs)
    accepted = await until(lambda: door.messages and door.messages[0])
    assert accepted == Accepted("j", 1, first.ledger.submits[0].seed, 5)
    first.ledger.step("j", 4)
    await until(lambda: door.text == text_of(4))
    await first.kill()
    second = await bus.worker("second")
    await until(lambda: "j" in second.ledger.runs)
    second.ledger.step("j", 6)
    second.ledger.finish("j")
    done = await until(lambda: door.end)
    assert (done.reason, done.attempt, done.seq) == ("length", 2, 10)
    assert done.crc == crc32_of_ids(map(ord, text_of(10)))
    assert door.text == text_of(10)
    assert sum(isinstance(message, Accepted) for message in door.messages) == 1
    bus.audit("j")


async def test_a_full_queue_refuses_a_durable_job(bus: Bus) -> None:
    front = await bus.worker("front", max_jobs=0, queue_limit=2)
    doors = [OtherDoor() for _ in range(3)]
    for i, door in enumerate(doors):
        front.door.tell(SubmitDurable(request(f"j{i}"), door))
    refused = await until(lambda: doors[2].messages and doors[2].messages[0])
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.error.retry_ms) == ("busy", 1_000)
    assert bus.num_entries() == 2


async def test_a_durable_job_that_comes_before_the_first_connection_waits_for_it(bus: Bus) -> None:
    """As from a client that is back sooner than a broker that was started again is."""
    worker = Worker(bus.server.url, bus.queue, "w")
    bus.workers.append(worker)
    door = OtherDoor()
    worker.door.tell(SubmitDurable(request("j"), door))
    worker.door.tell(Find("nobody's", door, "context"))
    worker.begin()
    worker.ledger.is_automatic = True
    await until(lambda: door.end)
    assert door.text == text_of(10)
    assert Found("nobody's", "context") in door.messages


async def test_without_redis_a_new_broker_refuses_durable_jobs_at_once(bus: Bus) -> None:
    worker = Worker("unix:///nowhere/redis.sock", bus.queue, "w")
    early, late = OtherDoor(), OtherDoor()
    worker.door.tell(SubmitDurable(request("j"), early))
    worker.door.tell(Find("j", early))
    worker.begin()
    await until(lambda: len(early.messages) == 2, timeout_s=2)
    worker.door.tell(SubmitDurable(request("k"), late))
    await until(lambda: late.messages, timeout_s=2)
    refused, found, again = *early.messages, *late.messages
    assert isinstance(refused, Refused)
    assert isinstance(found, Found)
    assert isinstance(again, Refused)
    assert {error and error.code for error in (refused.error, found.error, again.error)} == {"busy"}
    await worker.stop()


async def test_a_known_durable_job_is_followed_and_another_of_its_name_refused(bus: Bus) -> None:
    worker = await bus.worker("a")
    first, again, other = OtherDoor(), OtherDoor(), OtherDoor()
    worker.door.tell(SubmitDurable(request("j"), first))
    await until(lambda: "j" in worker.ledger.runs)
    worker.door.tell(SubmitDurable(request("j"), again))
    worker.door.tell(SubmitDurable(request("j", 11), other))
    refused = await until(lambda: other.messages and other.messages[0])
    assert isinstance(refused, Refused)
    assert refused.error.code == "conflict"
    worker.ledger.step("j", 10)
    worker.ledger.finish("j")
    await until(lambda: again.end)
    assert again.text == text_of(10)
    assert len(worker.ledger.submits) == 1


async def test_cancel_and_pause_reach_a_durable_job(bus: Bus) -> None:
    worker = await bus.worker("a")
    door = OtherDoor()
    worker.door.tell(SubmitDurable(request("j"), door))
    await until(lambda: "j" in worker.ledger.runs)
    worker.ledger.step("j")
    await until(lambda: door.text == text_of(1))
    worker.door.tell(Pause("j"))
    worker.ledger.step("j", 2)
    worker.door.tell(Cancel("j"))
    await until(lambda: bus.terminal("j"))
    assert door.end is None
    worker.door.tell(Unpause("j"))
    done = await until(lambda: door.end)
    assert (done.reason, door.text) == ("cancelled", text_of(3))


async def test_a_new_broker_follows_a_job_from_where_its_client_is(bus: Bus) -> None:
    worker = await bus.worker("a")
    job = bus.submit(max_tokens=10)
    await until(lambda: job in worker.ledger.runs)
    for num_tokens in (3, 3):
        worker.ledger.step(job, num_tokens)
        await until(lambda: len(bus.text(job)) == len(worker.ledger.runs[job].ids))
    door = OtherDoor()
    worker.door.tell(Follow(job, door, after=3))
    await until(lambda: door.text == text_of(6, start=4))
    worker.ledger.finish(job)
    await until(lambda: door.end)


async def test_a_relay_over_broken_connections_repeats_and_loses_nothing(
    bus: Bus, shared_redis: RedisServer
) -> None:
    proxy = await RedisProxy(shared_redis).start()
    front = Worker(proxy.url, bus.queue, "front", max_jobs=0)
    bus.workers.append(front)
    await front.start()
    worker = await bus.worker("worker")
    worker.ledger.is_automatic = True
    doors = [OtherDoor() for _ in range(5)]
    proxy.cut_after = b"hello"  # the first submit: its reply is lost
    for i, door in enumerate(doors):
        front.door.tell(SubmitDurable(request(f"j{i}", 40), door))
    for _ in range(4):
        await until(lambda: front.door.is_ready)
        proxy.cut()
    await until(lambda: all(door.end for door in doors))
    assert proxy.num_cuts == 1
    assert [door.text for door in doors] == [text_of(40)] * 5
    assert len(worker.ledger.submits) == 5
    await front.stop()
    await proxy.close()


async def test_a_reply_key_of_the_wrong_type_costs_only_its_own_follower(bus: Bus) -> None:
    worker = await bus.worker()
    good, bad = OtherDoor(), OtherDoor()
    bus.client.set(bus.keys.out("bad"), "a string")
    worker.door.tell(Follow("bad", bad, 3))
    worker.door.tell(SubmitDurable(request("j"), good))
    await until(lambda: "j" in worker.ledger.runs)
    worker.ledger.step("j", 10)
    worker.ledger.finish("j")
    await until(lambda: good.end)
    assert good.text == text_of(10)
    failed = await until(lambda: bad.end)
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.seq) == ("internal", 3)
    assert worker.monitor.is_ready
