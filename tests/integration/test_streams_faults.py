"""Faults at the Redis door, on real servers: workers that die, hang or lose the link; a Redis that
stops, restarts or comes back empty; entries that vanish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from broker.messages import Drain, Drop, Refused, Released
from broker.streams.lane import LinkLost
from ops.bench.chaos_proxy import TcpProxy
from tests.redis_proxy import RedisProxy
from tests.redis_servers import RedisServer, ServerBinary
from tests.streams_kit import Bus, Worker, open_bus, text_of, token_at, until
from tokenbus.errors import Busy, Conflict, Unsupported
from tokenbus.keys import GROUP


@pytest.fixture
async def bus(shared_redis: RedisServer) -> AsyncIterator[Bus]:
    async with open_bus(shared_redis) as bus:
        yield bus


@pytest.fixture
async def own_bus(redis_server: RedisServer) -> AsyncIterator[Bus]:
    """A bus on a server that the test may stop or empty."""
    async with open_bus(redis_server) as bus:
        yield bus


@pytest.fixture
async def own_proxy(redis_server: RedisServer) -> AsyncIterator[RedisProxy]:
    """A network between that server and a worker."""
    proxy = await RedisProxy(redis_server).start()
    yield proxy
    await proxy.close()


async def run_some(bus: Bus, worker: Worker, num_tokens: int = 3, **fields: object) -> str:
    """Submit a job and let the worker publish some tokens."""
    job = bus.submit(**{"max_tokens": 10, **fields})
    await until(lambda: job in worker.ledger.runs)
    worker.ledger.step(job, num_tokens)
    await until(lambda: bus.text(job) == text_of(num_tokens))
    return job


async def end(bus: Bus, worker: Worker, job: str) -> None:
    """Let the worker run the job to its end; audit it."""
    run = await until(lambda: worker.ledger.runs.get(job))
    worker.ledger.step(job, run.submit.prepared.max_tokens - len(run.ids))
    worker.ledger.finish(job)
    await until(lambda: bus.terminal(job))
    bus.audit(job)


async def test_another_worker_continues_a_dead_ones_job_at_the_next_token(bus: Bus) -> None:
    a = await bus.worker("a")
    job = await run_some(bus, a)
    await a.kill()
    killed_at = time.monotonic()
    b = await bus.worker("b")
    await until(lambda: job in b.ledger.runs)
    assert time.monotonic() - killed_at < 1.0 + 0.5 + 1.0  # lease, a look each quarter, this box
    submit = b.ledger.submits[0]
    assert (submit.attempt, submit.seed) == (2, a.ledger.submits[0].seed)
    assert "".join(map(chr, submit.prefix_ids)) == text_of(3)
    assert not submit.solo
    await end(bus, b, job)
    assert bus.events(job).count("started") == 2
    assert bus.text(job) == text_of(10)
    bus.audit_queue()


async def test_a_zombie_cannot_write_and_forgets_its_job(bus: Bus) -> None:
    a = await bus.worker("a")
    job = await run_some(bus, a)
    a.ledger.is_hung = True  # no progress: no renewal
    b = await bus.worker("b")
    await until(lambda: job in b.ledger.runs)
    a.ledger.step(job, 2)  # the zombie wakes up and publishes
    a.ledger.finish(job)
    await until(lambda: a.door.num_jobs == 0)
    assert a.door.counters.fenced == 1
    assert bus.text(job) == text_of(3)
    assert bus.num_pending() == 1  # no ack from the zombie
    assert not any(isinstance(message, Drop) for message in a.ledger.messages)  # it had ended
    await end(bus, b, job)
    bus.audit_queue()


async def test_a_hung_engine_loses_its_jobs_and_is_told_to_drop_them(bus: Bus) -> None:
    a = await bus.worker("a")
    job = await run_some(bus, a)
    a.ledger.is_hung = True
    b = await bus.worker("b")
    await until(lambda: job in b.ledger.runs)
    a.ledger.is_hung = False
    await until(lambda: Drop(job, door=a.door, attempt=1) in a.ledger.messages)
    assert a.door.num_jobs == 0
    await end(bus, b, job)


async def longest_stall_s(over_s: float) -> float:
    """The longest time in which nothing ran here, out of `over_s`."""
    tick_s, longest_s, until_s = 0.02, 0.0, time.monotonic() + over_s
    while (now_s := time.monotonic()) < until_s:
        await asyncio.sleep(tick_s)
        longest_s = max(longest_s, time.monotonic() - now_s - tick_s)
    return longest_s


async def test_a_long_job_keeps_its_lease(bus: Bus) -> None:
    """Three leases long. A worker that a busy machine stops for most of a lease may lose its job:
    where that happened it is tried again.
    """
    lease_s = 0.4
    settings = {"lease_ms": round(lease_s * 1000), "renew_ms": 100}
    a, b = await bus.worker("a", **settings), await bus.worker("b", max_jobs=0, **settings)
    for _ in range(5):
        job = await run_some(bus, a)
        b.ledger.max_jobs = 1  # from now on it would take the job
        b.ledger.say_capacity()
        stall_s = await longest_stall_s(3 * lease_s)
        if job not in b.ledger.runs or stall_s < lease_s / 4:
            break
        await end(bus, b, job)
        b.ledger.max_jobs = 0
        b.ledger.say_capacity()
    assert job not in b.ledger.runs, f"taken after a stall of {stall_s:.3f} s at most"
    await end(bus, a, job)
    assert bus.events(job).count("started") == 1


async def test_a_late_answer_to_an_earlier_attempt_is_not_taken_for_this_one(bus: Bus) -> None:
    a = await bus.worker("a")
    job = await run_some(bus, a)
    await a.kill()
    b = await bus.worker("b")
    await until(lambda: job in b.ledger.runs)
    assert b.ledger.submits[0].attempt == 2
    b.door.tell(Refused(job, Busy("late", retry_ms=1), attempt=1))  # would give the job back
    b.door.tell(Refused(job, Conflict("late"), attempt=1))  # would end it
    b.door.tell(Released([(job, 1)]))
    await until(lambda: b.door.num_waiting == 0)
    await end(bus, b, job)
    assert (bus.events(job)[-1], bus.text(job)) == ("done", text_of(10))
    assert b.door.counters.released == 0
    bus.audit_queue()


async def test_two_claimants_of_one_entry_run_it_once(bus: Bus) -> None:
    a = await bus.worker("a")
    jobs = [await run_some(bus, a) for _ in range(20)]
    await a.kill()
    b, c = await bus.worker("b", lease_ms=300), await bus.worker("c", lease_ms=300)
    await until(lambda: len(b.ledger.runs) + len(c.ledger.runs) == len(jobs))
    b.ledger.is_automatic = c.ledger.is_automatic = True
    await until(lambda: all(bus.terminal(job) for job in jobs))
    for job in jobs:
        bus.audit(job)
    bus.audit_queue()


async def test_a_job_whose_worker_dies_three_times_is_alone_in_the_dead_stream(bus: Bus) -> None:
    quick = {"lease_ms": 200, "renew_ms": 50}
    first = await bus.worker("w0", **quick)
    job = await run_some(bus, first, prompt="poison", top_k=5)
    good = await run_some(bus, first)
    await first.kill()
    second = await bus.worker("w1", **quick)
    await until(lambda: job in second.ledger.runs)
    await end(bus, second, good)
    assert not any(submit.solo for submit in second.ledger.submits)
    await second.kill()
    third = await bus.worker("w2", **quick)
    await until(lambda: job in third.ledger.runs)
    assert [submit.solo for submit in third.ledger.submits] == [True]
    await third.kill()
    last = await bus.worker("last", **quick)
    error = await until(lambda: bus.terminal(job))
    assert (error["code"], error["retry"]) == ("poisoned", "false")
    (_, dead), *more = bus.client.xrange(bus.keys.dead)
    assert more == []
    assert (dead["job"], dead["crashes"], dead["worker"]) == (job, "3", "last")
    assert (dead["request.prompt"], dead["request.top_k"]) == ("poison", "5")
    assert last.ledger.submits == []
    bus.audit(job)
    bus.audit_queue()


async def test_a_suspect_that_gets_on_lets_the_next_one_run(bus: Bus) -> None:
    """Three jobs outlive two workers: nobody has to wait until the first of them has ended."""
    quick = {"lease_ms": 300, "renew_ms": 60}
    first = await bus.worker("w0", **quick)
    jobs = [await run_some(bus, first, max_tokens=60) for _ in range(3)]
    await first.kill()
    second = await bus.worker("w1", **quick)
    await until(lambda: len(second.ledger.runs) == 3)
    await second.kill()
    third = await bus.worker("w2", **quick)
    for count in (1, 2, 3):
        await until(lambda n=count: len(third.ledger.submits) == n)
        await asyncio.sleep(0.1)
        assert len(third.ledger.submits) == count
        assert third.ledger.submits[-1].solo
        third.ledger.step(third.ledger.submits[-1].prepared.request.job, 16)
    third.ledger.is_automatic = True
    await until(lambda: all(bus.terminal(job) for job in jobs))
    for job in jobs:
        bus.audit(job)
    bus.audit_queue()


async def test_a_job_that_gets_on_between_crashes_is_never_given_up(bus: Bus) -> None:
    a = await bus.worker("w0", lease_ms=200, renew_ms=50)
    job = await run_some(bus, a, 40, max_tokens=400)
    await a.kill()
    for i in range(1, 5):
        worker = await bus.worker(f"w{i}", lease_ms=200, renew_ms=50)
        await until(lambda w=worker: job in w.ledger.runs)
        assert not worker.ledger.submits[0].solo
        worker.ledger.step(job, 40)
        await until(lambda n=i: bus.text(job) == text_of(40 + 40 * n))
        await worker.kill()
    last = await bus.worker("last", lease_ms=200, renew_ms=50)
    await end(bus, last, job)


async def test_a_drain_gives_jobs_back_uncounted_and_others_take_them_at_once(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=15_000, renew_ms=5_000)
    b = await bus.worker("b", lease_ms=15_000, renew_ms=5_000, max_jobs=0)
    job = await run_some(bus, a)
    a.door.tell(Drain(0))
    queued = bus.submit(max_tokens=5)
    b.ledger.max_jobs = 10
    b.ledger.say_capacity()
    await until(lambda: queued in b.ledger.runs)
    assert queued not in a.ledger.runs
    released_at = time.monotonic()
    a.ledger.step(job, 2)
    a.ledger.release(job)
    await until(lambda: job in b.ledger.runs)
    assert time.monotonic() - released_at < 1.0
    assert b.ledger.runs[job].ids == [ord(char) for char in text_of(5)]
    assert (bus.state(job)["crashes"], bus.state(job)["attempt"]) == ("0", "2")
    await a.stop()
    await end(bus, b, job)
    await end(bus, b, queued)
    bus.audit_queue()


async def test_many_jobs_given_back_are_taken_up_in_a_few_round_trips(bus: Bus) -> None:
    """Each needs its log, and Redis is 60 ms away; all of them count as given back."""
    a = await bus.worker("a", lease_ms=15_000, renew_ms=5_000)
    jobs = [await run_some(bus, a) for _ in range(48)]
    with TcpProxy(bus.server.socket_path) as proxy:
        b = Worker(f"redis://127.0.0.1:{proxy.port}", bus.queue, "b", lease_ms=15_000)
        bus.workers.append(await b.start())
        proxy.delay(proxy.up, 0.06)
        released_at = time.monotonic()
        a.ledger.release(*jobs)
        await until(lambda: len(b.ledger.runs) == len(jobs))
        assert time.monotonic() - released_at < 48 * 0.06 / 2
        assert (b.door.counters.claimed, b.door.counters.taken_over) == (48, 0)
        b.ledger.is_automatic = True
        await until(lambda: all(bus.terminal(job) for job in jobs))
        await b.stop()
    for job in jobs:
        bus.audit(job)
    bus.audit_queue()


async def test_a_stopped_worker_leaves_nothing_to_a_lease(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=15_000, renew_ms=5_000)
    job = await run_some(bus, a)
    b = await bus.worker("b", lease_ms=15_000, renew_ms=5_000)
    stopped_at = time.monotonic()
    await a.stop()
    await until(lambda: job in b.ledger.runs)
    assert time.monotonic() - stopped_at < 1.0
    consumers = [c["name"] for c in bus.client.xinfo_consumers(bus.keys.jobs(), "workers")]
    assert "a" not in consumers
    await end(bus, b, job)


async def test_pending_entries_without_a_body_are_acknowledged_and_counted(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=300, renew_ms=100)
    jobs = [await run_some(bus, a) for _ in range(3)]
    await a.kill()
    bus.client.xdel(bus.keys.jobs(), jobs[0])
    bus.client.xtrim(bus.keys.jobs(), maxlen=1, approximate=False)
    b = await bus.worker("b", lease_ms=300, renew_ms=100)
    await until(lambda: b.door.counters.deleted == 2)
    await end(bus, b, jobs[2])
    assert bus.num_pending() == 0


async def test_an_entry_deleted_while_it_runs_still_ends_well(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=300, renew_ms=50)
    job = await run_some(bus, a)
    bus.client.xdel(bus.keys.jobs(), job)
    await asyncio.sleep(0.5)
    await end(bus, a, job)
    assert bus.num_pending() == 0


async def test_a_job_sent_again_after_its_entry_was_deleted_outlives_its_first_attempt(
    bus: Bus,
) -> None:
    a = await bus.worker("a", lease_ms=600, renew_ms=200)
    first = bus.client.xadd(bus.keys.jobs(), {"prompt": "hello", "job": "x", "max_tokens": 10})
    await until(lambda: "x" in a.ledger.runs)
    a.ledger.step("x", 3)
    await until(lambda: bus.text("x") == text_of(3))
    bus.client.xack(bus.keys.jobs(), GROUP, first)
    bus.client.xdel(bus.keys.jobs(), first)
    bus.submit(job="x", max_tokens=10)
    await until(lambda: a.door.counters.fenced == 1)
    await until(lambda: len(a.ledger.submits) == 2)
    assert a.ledger.runs["x"].submit.attempt == 2
    assert a.door.num_jobs == 1
    await end(bus, a, "x")
    bus.audit_queue()


async def test_a_job_whose_reply_was_emptied_by_hand_ends_with_an_error(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=300, renew_ms=100)
    job = await run_some(bus, a)
    await a.kill()
    bus.client.xtrim(bus.keys.out(job), maxlen=0, approximate=False)
    bad = bus.keys.out("bad")
    bus.client.xadd(bad, {"event": "started"}, id="5-0")
    bus.client.xtrim(bad, maxlen=0, approximate=False)
    await bus.worker("b", lease_ms=300, renew_ms=100)
    error = await until(lambda: bus.terminal(job))
    assert (error["code"], bus.out(job)[-1][0]) == ("internal", "2-1")
    bus.submit(job="bad", temperature="hot")
    error = await until(lambda: bus.terminal("bad"))
    assert (error["code"], error["field"]) == ("invalid", "temperature")
    bus.audit_queue()


async def test_an_entry_delivered_into_a_broken_connection_is_found_again(bus: Bus) -> None:
    a = await bus.worker("a", lease_ms=2_000, renew_ms=500)
    job = bus.client.xadd("elsewhere" + bus.queue, {"a": "b"})  # an id nobody has
    a.ledger.max_jobs = 0
    a.ledger.say_capacity()
    await asyncio.sleep(0.3)
    job = bus.submit()
    read = bus.client.xreadgroup("workers", "a", {bus.keys.jobs(): ">"}, count=1)
    assert read[0][1][0][0] == job
    a.ledger.max_jobs = 5
    a.ledger.say_capacity()
    await until(lambda: job in a.ledger.runs, timeout_s=5)
    await end(bus, a, job)
    bus.audit_queue()


async def test_jobs_go_on_after_the_group_is_destroyed(bus: Bus) -> None:
    a = await bus.worker("a")
    job = await run_some(bus, a)
    for stream in (bus.keys.jobs(), bus.keys.jobs("high"), bus.keys.jobs("low")):
        bus.client.xgroup_destroy(stream, "workers")
    another = bus.submit(max_tokens=3)
    await until(lambda: another in a.ledger.runs, timeout_s=2)
    await end(bus, a, another)
    await end(bus, a, job)


async def test_after_flushall_running_jobs_rebuild_their_reply(own_bus: Bus) -> None:
    bus = own_bus
    a = await bus.worker("a")
    job = await run_some(bus, a)
    a.ledger.step(job)
    await until(lambda: bus.text(job) == text_of(4))
    before = bus.out(job)
    bus.client.flushall()
    another = bus.submit(max_tokens=3)
    await until(lambda: another in a.ledger.runs, timeout_s=2)
    await end(bus, a, another)
    await until(lambda: bus.out(job)[: len(before)] == before)
    await end(bus, a, job)
    assert a.door.counters.restored == 1
    bus.audit_queue()


@pytest.mark.parametrize("goes_on", [True, False], ids=["more tokens", "the end"])
async def test_an_entry_that_a_reader_may_have_seen_is_written_again_as_it_was(
    goes_on: bool, own_bus: Bus, own_proxy: RedisProxy
) -> None:
    """Its answer was lost, and then the entry: grouped with later tokens it would overlap what the
    reader has, and a text cannot be cut by token.
    """
    bus, proxy = own_bus, own_proxy
    a = Worker(proxy.url, bus.queue, "a")
    bus.workers.append(a)
    await a.start()
    job = await run_some(bus, a)
    proxy.drop_replies = True
    a.ledger.step(job, 2)
    await until(lambda: bus.text(job) == text_of(5))
    seen = bus.out(job)
    bus.client.flushall()
    if goes_on:
        a.ledger.step(job, 3)
    a.ledger.finish(job)
    proxy.heal()
    proxy.cut()
    await until(lambda: bus.terminal(job))
    assert bus.out(job)[: len(seen)] == seen
    assert bus.text(job) == text_of(8 if goes_on else 5)
    bus.audit(job)


async def test_a_job_sent_again_after_flushall_goes_on_where_it_was(own_bus: Bus) -> None:
    bus = own_bus
    a = await bus.worker("a", lease_ms=600, renew_ms=200)
    await run_some(bus, a, job="x")
    entry = bus.state("x")["entry"]
    bus.client.flushall()
    a.ledger.step("x")
    await until(lambda: bus.text("x") == text_of(4))
    assert bus.state("x")["entry"] == entry
    bus.submit(job="x", max_tokens=10)
    await until(lambda: a.door.counters.fenced == 1)
    await until(lambda: len(a.ledger.submits) == 2)
    assert a.ledger.runs["x"].submit.attempt == 2
    await end(bus, a, "x")
    bus.audit_queue()


async def test_a_stopped_redis_is_noticed_and_nothing_is_lost_or_taken(own_bus: Bus) -> None:
    bus = own_bus
    a = await bus.worker("a", lease_ms=900, renew_ms=300)
    job = await run_some(bus, a)
    b = await bus.worker("b", lease_ms=900, renew_ms=300)
    bus.server.pause()
    stopped_at = time.monotonic()
    a.ledger.step(job, 4)
    await until(lambda: not a.monitor.is_ready and not b.monitor.is_ready, timeout_s=5)
    await asyncio.sleep(max(0.0, stopped_at + 2.5 - time.monotonic()))
    bus.server.resume()
    resumed_at = time.monotonic()
    await until(lambda: a.monitor.is_ready and b.monitor.is_ready, timeout_s=2)
    await until(lambda: bus.text(job) == text_of(7), timeout_s=2)
    new = bus.submit(max_tokens=2)
    await until(lambda: new in a.ledger.runs or new in b.ledger.runs, timeout_s=2)
    assert time.monotonic() - resumed_at < 3
    await asyncio.sleep(1.0)
    assert job not in b.ledger.runs
    await end(bus, a, job)
    assert bus.events(job).count("started") == 1


@pytest.fixture
async def aof_bus(redis_binary: ServerBinary) -> AsyncIterator[Bus]:
    """A bus on a server that keeps its data over kill -9."""
    server = RedisServer(redis_binary, aof=True).start()
    async with open_bus(server) as bus:
        yield bus
    server.close()


async def test_a_killed_redis_comes_back_and_every_stream_is_whole(aof_bus: Bus) -> None:
    bus = aof_bus
    a = await bus.worker("a")
    a.ledger.is_automatic = True
    jobs = [bus.submit(max_tokens=60) for _ in range(10)]
    await until(lambda: all(len(bus.text(job)) > 5 for job in jobs))
    bus.server.kill()
    await asyncio.sleep(0.4)
    bus.server.start()
    await until(lambda: all(bus.terminal(job) for job in jobs))
    for job in jobs:
        bus.audit(job)
    await until(lambda: bus.num_entries() == 0)
    bus.audit_queue()
    assert a.door.counters.reconnects >= 1


async def test_a_job_that_buffers_too_much_is_paused_until_redis_is_back(own_bus: Bus) -> None:
    bus = own_bus
    a = await bus.worker("a", lease_ms=30_000)
    job = await run_some(bus, a, max_tokens=6_000)
    bus.server.pause()
    a.ledger.step(job, 5_000)
    await until(lambda: a.ledger.runs[job].is_paused)
    bus.server.resume()
    await until(lambda: not a.ledger.runs[job].is_paused)
    await until(lambda: len(bus.text(job)) == 5_003)
    await end(bus, a, job)


async def test_a_redis_that_may_evict_is_refused_with_the_remedy(
    redis_binary: ServerBinary,
) -> None:
    server = RedisServer(redis_binary, extra=("--maxmemory-policy", "allkeys-lru")).start()
    try:
        worker = Worker(server.url, "q", "a")
        worker.begin()
        crash = await asyncio.wait_for(worker.system.crashed, 5)
        assert isinstance(crash.cause, Unsupported)
        assert "CONFIG SET maxmemory-policy noeviction" in str(crash.cause)
        await worker.kill()
    finally:
        server.close()


async def test_a_full_redis_makes_the_door_unready_until_there_is_room(own_bus: Bus) -> None:
    bus = own_bus
    a = await bus.worker("a")
    job = await run_some(bus, a)
    used = bus.client.info("memory")["used_memory"]
    bus.client.config_set("maxmemory", used // 2)
    a.ledger.step(job, 2)
    await until(lambda: not a.monitor.is_ready)
    bus.client.config_set("maxmemory", 0)
    await until(lambda: a.monitor.is_ready)
    await end(bus, a, job)


async def test_a_reply_that_cannot_be_rebuilt_yet_is_rebuilt_when_redis_takes_writes(
    own_bus: Bus,
) -> None:
    bus = own_bus
    a = await bus.worker("a")
    job = await run_some(bus, a)
    bus.client.delete(bus.keys.out(job), bus.keys.job(job))
    bus.client.config_set("maxmemory", bus.client.info("memory")["used_memory"] // 2)
    a.ledger.step(job, 2)
    await until(lambda: not a.monitor.is_ready)
    await asyncio.sleep(0.7)  # the first try after the refusal is refused too
    assert not a.monitor.is_ready
    bus.client.config_set("maxmemory", 0)
    await until(lambda: a.monitor.is_ready)
    await until(lambda: bus.text(job) == text_of(5))
    assert a.door.counters.restored == 1
    await end(bus, a, job)


async def test_a_reply_that_can_never_be_rebuilt_costs_only_its_own_job(bus: Bus) -> None:
    a = await bus.worker("a")
    job, good = await run_some(bus, a), await run_some(bus, a)
    bus.client.delete(bus.keys.out(job))
    bus.client.set(bus.keys.job(job), "a string")
    a.ledger.step(job)
    await until(lambda: bus.client.xlen(bus.keys.dead) == 1)
    await until(lambda: job not in a.ledger.runs)
    await end(bus, a, good)
    assert a.monitor.is_ready
    assert (bus.num_entries(), bus.num_pending(), bus.out(job)) == (0, 0, [])


async def test_an_earlier_reply_that_redis_refuses_to_read_is_asked_for_again(
    own_bus: Bus,
) -> None:
    bus = own_bus
    ids = f"[{','.join(str(token_at(seq)) for seq in (1, 2, 3))}]"
    out = bus.keys.out("j")
    bus.client.xadd(out, {"event": "started", "attempt": 1, "seed": 1, "seq": 0}, id="1-0")
    tokens = {"event": "tokens", "seq": 1, "ids": ids, "text": text_of(3)}
    bus.client.xadd(out, tokens, id="1-3")
    a = await bus.worker("a")
    bus.client.execute_command("ACL", "SETUSER", "default", "-xrange")
    bus.submit(job="j", max_tokens=10)
    await until(lambda: not a.monitor.is_ready)
    bus.client.execute_command("ACL", "SETUSER", "default", "+xrange")
    await until(lambda: a.monitor.is_ready)
    await end(bus, a, "j")
    assert (a.ledger.submits[0].attempt, len(a.ledger.submits)) == (2, 1)


async def test_a_cancelled_wait_does_not_disturb_the_next_reply(bus: Bus) -> None:
    """The trap of redis-py#2624: a reply of an abandoned command taken for that of the next."""
    a = await bus.worker("a")
    link = a.door._state.link
    bus.client.set("x" + bus.queue, "mine")
    for _ in range(50):
        task = asyncio.ensure_future(link.call("GET", "nothing"))
        await asyncio.sleep(0)
        task.cancel()
        assert await link.call("GET", "x" + bus.queue) == b"mine"
    a.door._state.link.close()
    with pytest.raises(LinkLost):
        await link.call("PING")
