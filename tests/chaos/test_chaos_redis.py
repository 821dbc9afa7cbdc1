"""Redis that dies, stands still, comes back empty, is full or out of reach, under whole workers
that share one queue.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio

from tests.chaos.kit.site import LEASE_S, Ask, ChaosSite, Listener, open_site, wait_for
from tokenbus import AsyncClient
from tokenbus.errors import TokenbusError, UnknownJob

STEP = ("--set", "fake.step_ms=10")
NOTICE_S = 5.0  # until the worker says that it is not ready
RETURN_S = 2.0  # until a job runs again after Redis is back
BUSY_BOX_S = 1.0

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ChaosSite]:
    """Two workers, for all tests that leave them as they were."""
    async with open_site(2, STEP) as site:
        yield site


async def ready_over_zmq(site: ChaosSite, worker: int = 0) -> bool:
    """As a ZeroMQ client or a probe learns it: Redis cannot be asked."""
    log = site.workers[worker].process
    assert log is not None
    lines = log.log_file.read_text().splitlines()
    for line in reversed(lines):
        if "broker.not_ready" in line:
            return False
        if '"broker.ready"' in line:
            return True
    return False


async def not_ready(site: ChaosSite, workers: Iterable[int] | None = None) -> None:
    """Until every worker (of these) has noticed."""
    deadline_s = time.monotonic() + NOTICE_S + BUSY_BOX_S
    for i in workers or range(len(site.workers)):
        while await ready_over_zmq(site, i):
            assert time.monotonic() < deadline_s, "a worker calls itself ready without Redis"
            await asyncio.sleep(0.05)


async def runs_again(site: ChaosSite) -> None:
    """A new job ends soon."""
    (job,) = site.submit(1, 5, "afterwards")
    await site.over([job], timeout_s=RETURN_S + BUSY_BOX_S)


async def refused_in_words(site: ChaosSite) -> None:
    """Over both doors a new job is told that it may be tried again, and by when."""
    doors = ({"redis": site.site.redis.url}, {"zmq": site.workers[0].endpoint})
    for door in doors:
        async with AsyncClient(**door, queue=site.keys.queue) as client:
            with pytest.raises(TokenbusError) as refused:
                await client.submit("no room", max_tokens=5, durable="zmq" in door)
        error = refused.value
        assert error.code == ("busy" if "zmq" in door else "unavailable"), error
        assert (error.retry, error.retry_ms) == (True, 1_000)


async def test_redis_killed_under_load_comes_back_with_its_file_and_nothing_is_lost(
    pair: ChaosSite,
) -> None:
    jobs = pair.submit(12, 400)
    listener = Listener()
    for i in range(4):
        listener.generate(pair.zmq(i % 2), Ask(f"beside {i}", 300))
    await pair.running(jobs)
    await listener.running()
    pair.site.redis.kill()
    await not_ready(pair)
    await asyncio.to_thread(pair.site.redis.start)
    await runs_again(pair)
    await listener.audit()
    await pair.audit()


async def test_redis_standing_still_for_three_leases_moves_no_job() -> None:
    """All idle times have grown meanwhile: leases are renewed first, and nobody takes over."""
    async with open_site(2, ("--set", "fake.step_ms=30")) as site:
        jobs = site.submit(20, 300)
        await site.running(jobs)
        site.site.redis.send(signal.SIGSTOP)
        await not_ready(site)
        await asyncio.sleep(LEASE_S * 3 - NOTICE_S + 2)
        site.site.redis.send(signal.SIGCONT)
        await runs_again(site)
        await site.audit()
        assert {site.attempts(job) for job in jobs} == {1}


async def test_redis_emptied_while_idle_and_while_busy_goes_on_within_two_seconds() -> None:
    async with open_site(1, STEP) as site:
        site.client.flushall()
        await asyncio.sleep(0.5)
        await runs_again(site)
        jobs = site.submit(6, 300)
        await site.running(jobs)
        site.client.flushall()
        gone = [job for job in site.asked if job not in jobs]
        for job in gone:  # their replies went with everything else
            del site.asked[job]
        await runs_again(site)
        await site.audit()


async def test_a_worker_cut_off_from_redis_stops_publishing_and_the_other_goes_on() -> None:
    async with open_site(1, STEP) as site:
        mine = site.submit(16, 600)
        await site.running(mine)
        (lonely,), other = site.workers[:], await site.join()
        assert site.owners(mine) == {lonely.name}
        lonely.proxy.swallow(lonely.proxy.up)
        await wait_for(
            lambda: all(site.is_over(job) or site.owners([job]) == {other.name} for job in mine),
            LEASE_S + 5.0 + BUSY_BOX_S,
            "the other worker took the jobs over",
        )
        await not_ready(site, [0])
        lonely.proxy.heal()
        await site.audit()
        assert max(site.attempts(job) for job in mine) == 2


async def test_a_proxy_that_accepts_and_says_nothing_is_no_redis() -> None:
    async with open_site(1, STEP) as site:
        jobs = site.submit(4, 300)
        await site.running(jobs)
        proxy = site.workers[0].proxy
        proxy.cut()
        proxy.stall(proxy.down)
        await not_ready(site)
        await asyncio.sleep(2.0)
        assert not await ready_over_zmq(site)
        proxy.heal()
        await runs_again(site)
        await site.audit()


async def test_connections_cut_again_and_again_under_load_disturb_nothing(pair: ChaosSite) -> None:
    jobs = pair.submit(16, 400)
    await pair.running(jobs)
    for i in range(12):
        pair.workers[i % 2].proxy.cut()
        await asyncio.sleep(0.25)
    await pair.audit()


async def test_a_disk_full_under_the_append_only_file_is_as_redis_gone_until_there_is_room() -> (
    None
):
    async with open_site(1, STEP) as site:
        jobs = site.submit(4, 300)
        await site.running(jobs)
        pid = site.site.redis.pid
        size = max(path.stat().st_size for path in site.site.directory.rglob("*.aof"))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        await not_ready(site)
        await refused_in_words(site)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        await wait_for(
            lambda: site.client.info("persistence")["aof_last_write_status"] == "ok",
            10.0,
            "Redis writes again",
        )
        await runs_again(site)
        await site.audit()


async def test_one_job_id_added_twice_at_once_a_hundred_times_runs_once_each(
    pair: ChaosSite,
) -> None:
    twin = pair.site.redis.client()
    jobs = [f"twin-{i}" for i in range(100)]
    for job in jobs:
        ask = Ask(job, 5)
        fields = {"job": job, "prompt": ask.prompt, "max_tokens": 5}
        await asyncio.gather(
            asyncio.to_thread(pair.client.xadd, pair.keys.jobs(), fields),
            asyncio.to_thread(twin.xadd, pair.keys.jobs(), fields),
        )
        pair.asked[job] = ask
    twin.close()
    await pair.audit()
    assert {pair.attempts(job) for job in jobs} == {1}


async def test_cancel_from_another_process_reaches_a_job_wherever_it_is() -> None:
    """Queued, running, finished, unknown, and twice."""
    settings = (*STEP, "--set", "engine.max_num_seqs=2")
    async with open_site(2, settings) as site:
        (finished,) = site.submit(1, 3, "finished")
        await site.over([finished])
        jobs = site.submit(16, 3000)
        await wait_for(lambda: sum(map(site.has_tokens, jobs)) == 4, 20.0, "four jobs run")
        running = [job for job in jobs if site.has_tokens(job)]
        queued = [job for job in jobs if job not in running]
        async with AsyncClient(redis=site.site.redis.url, queue=site.keys.queue) as client:
            for job in (*queued, *running, *queued, finished, "nobody-knows-it"):
                await client.cancel(job)
            await site.over([*running, *queued], timeout_s=20)
            with pytest.raises(UnknownJob):
                await client.status("nobody-knows-it")
        for job in (*running, *queued):
            words = [fields["event"] for fields in site.out(job)]
            assert words.count("done") == 1, words
            assert site.last(job)["reason"] == "cancelled"
            ask = site.asked.pop(job)
            ids = site.auditor.ids_of(job)
            assert ids == ask.ids[: len(ids)]
            assert len(ids) < ask.max_tokens
            assert not site.auditor.problems([job])
        # They were cancelled before the running ones, whose rows would have been theirs.
        assert not any(site.auditor.ids_of(job) for job in queued)
        await site.audit()


async def test_a_cancel_from_elsewhere_ends_a_running_job_within_a_step_and_50_ms(
    pair: ChaosSite,
) -> None:
    """At best: a busy machine makes any single one late."""
    took_s: list[float] = []
    async with AsyncClient(redis=pair.site.redis.url, queue=pair.keys.queue) as client:
        while not took_s or (min(took_s) > 0.060 and len(took_s) < 20):
            (job,) = pair.submit(1, 3000, "to cancel")
            ask = pair.asked.pop(job)
            await pair.running([job])
            stream = client.tail(job)
            await anext(stream)
            began_s = time.monotonic()
            await client.cancel(job)
            text = await stream.text()
            took_s.append(time.monotonic() - began_s)
            assert stream.done is not None
            assert stream.done.reason == "cancelled"
            assert len(text) < ask.max_tokens
    assert min(took_s) < 0.060, took_s
    await pair.audit()  # its blocks are free


async def test_a_clients_death_leaves_its_redis_jobs_running() -> None:
    async with open_site(1, STEP) as site:
        client = AsyncClient(redis=site.site.redis.url, queue=site.keys.queue)
        job = await client.submit("left alone", max_tokens=100, job="left")
        await client.close()
        site.asked[job] = Ask("left alone", 100)
        await site.audit()
