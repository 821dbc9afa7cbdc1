"""Workers that die in the middle of taking over, and a count of crashes that stays with the job.

Doors of the broker on the test's own loop, with a ledger that is played: a worker can be killed at
any of its awaits, and hundreds of deaths cost seconds. CLAIM_DEATHS sets how many die while they
take over (default 30).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator

import pytest

from tests.redis_servers import RedisServer, find_servers
from tests.streams_kit import Bus, open_bus, until

QUICK = {"lease_ms": 150, "renew_ms": 40}


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    server = RedisServer(find_servers()[-1]).start()
    try:
        async with open_bus(server) as bus:
            yield bus
    finally:
        server.close()


async def turns(count: int) -> None:
    """Let everybody else run so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_death_at_any_point_of_a_take_over_ends_no_take_overs(bus: Bus) -> None:
    """Workers die while they claim, fence, read the log or start; then one does not."""
    num_deaths = int(os.environ.get("CLAIM_DEATHS", "30"))
    rng = random.Random(8)
    settings = {**QUICK, "max_attempts": 10_000}
    first = await bus.worker("first", **settings)
    jobs = [bus.submit(max_tokens=50 + 4 * num_deaths) for _ in range(4)]
    await until(lambda: len(first.ledger.runs) == len(jobs))
    for job in jobs:
        first.ledger.step(job, 20)
    await until(lambda: all(bus.text(job) for job in jobs))
    await first.kill()
    num_caught = 0
    for i in range(num_deaths):
        await asyncio.sleep(0.15)  # a lease
        worker = await bus.worker(f"w{i}", **settings)
        await turns(rng.randint(0, 120))
        for job in list(worker.ledger.runs):
            worker.ledger.step(job, rng.randint(0, 3))
        await turns(rng.randint(0, 60))
        num_caught += 0 < worker.door.num_jobs < len(jobs) or len(worker.ledger.runs) < len(jobs)
        await worker.kill()
    assert num_caught > num_deaths / 10, "the deaths came before or after the take-overs"
    last = await bus.worker("last", **settings)
    last.ledger.is_automatic = True
    (another,) = [bus.submit(max_tokens=5)]
    await until(
        lambda: all(bus.terminal(job) for job in (*jobs, another)), timeout_s=30 + num_deaths
    )
    for job in (*jobs, another):
        bus.audit(job)
        assert bus.events(job)[-1] == "done"
    bus.audit_queue()


async def test_the_count_of_crashes_is_the_jobs_whichever_way_it_comes_back(bus: Bus) -> None:
    """By its lease to another worker, and by a restart to a broker of the same name, in turn."""
    job = bus.submit(prompt="deadly")
    names = ["a", "b", "b"]  # the third is the second's broker, started again
    for name in names:
        worker = await bus.worker(name, **QUICK)
        await until(lambda w=worker: job in w.ledger.runs)
        await worker.kill()
    last = await bus.worker("c", **QUICK)
    error = await until(lambda: bus.terminal(job))
    assert error["code"] == "poisoned"
    assert last.ledger.submits == []
    (_, dead), *more = bus.client.xrange(bus.keys.dead)
    assert (more, dead["job"], dead["crashes"]) == ([], job, "3")
    bus.audit(job)
    bus.audit_queue()


async def test_a_restarted_broker_that_finds_its_own_job_keeps_it(bus: Bus) -> None:
    """Late in the lease: another worker, about to take the job over, must see the lease renewed."""
    settings = {"lease_ms": 3_000, "renew_ms": 1_000}
    first = await bus.worker("a", **settings)
    job = bus.submit(max_tokens=10)
    await until(lambda: job in first.ledger.runs)
    first.ledger.step(job, 3)
    await until(lambda: bus.text(job))
    other = await bus.worker("b", **settings)
    await first.kill()
    stream = bus.keys.jobs()
    await until(
        lambda: (
            bus.client.xpending_range(stream, "workers", "-", "+", 1)[0]["time_since_delivered"]
            >= 2_300
        )
    )
    again = await bus.worker("a", lease_ms=3_000, renew_ms=8_000)  # its claim must do by itself
    await until(lambda: again.ledger.submits or other.ledger.submits)
    await asyncio.sleep(1.7)  # past the end of the old lease, before that of the new one
    assert other.ledger.submits == []
    again.ledger.step(job, 7)
    again.ledger.finish(job)
    await until(lambda: bus.terminal(job))
    assert bus.state(job)["crashes"] == "1"
    bus.audit(job)
    bus.audit_queue()
