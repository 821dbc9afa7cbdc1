"""Processes that die, hang, or are told to go, in whole workers that share one queue."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

import broker
import engine
import kernels
import ops
import tokenbus
from ops.bench.chaos_site import send
from tests.chaos.kit import processes
from tests.chaos.kit.site import LEASE_S, Ask, Listener, open_site, wait_for

STEP = ("--set", "fake.step_ms=10")
LONG_LEASE_S = 15.0  # nobody loses a lease because the machine is slow
LONG_LEASE = ("--set", "streams.lease_ms=15000", "--set", "streams.renew_ms=3000")
POISON = ord("~")

pytestmark = pytest.mark.timeout(240)


async def test_kills_of_engine_broker_and_worker_at_random_tokens_disturb_nothing() -> None:
    rng = random.Random(5)
    async with open_site(2, STEP) as site:
        for victim in ("engine", "broker", "worker"):
            jobs = site.submit(6, 150)
            listener = Listener()
            for i in range(4):
                listener.generate(site.zmq(i % 2), Ask(f"{victim} {i}", 150))
            await site.running(jobs)
            await listener.running(at_least=rng.randint(1, 40))
            worker = rng.choice(site.workers)
            count = worker.num_ready
            if victim == "worker":
                worker.kill_all()
                await worker.stop()
                await worker.start()
            else:
                processes.kill(worker.pid(victim))
                assert await worker.wait_ready(count + 1, 30.0), worker.lost
            await listener.audit()
            await site.over()
        await site.audit()


async def test_kill_9_of_the_broker_with_fifty_streams_open_loses_none() -> None:
    async with open_site(1, ("--set", "fake.step_ms=20")) as site:
        listener = Listener()
        client = site.zmq()
        for i in range(50):
            listener.generate(client, Ask(f"stream {i}", 120))
        jobs = site.submit(10, 120)
        await site.running(jobs)
        await listener.running(at_least=10)
        processes.kill(site.workers[0].pid("broker"))
        await listener.audit()
        await site.audit()


async def test_a_stopped_engine_loses_its_jobs_and_as_a_zombie_writes_nothing() -> None:
    async with open_site(1, STEP) as site:
        jobs = site.submit(12, 600)
        await site.running(jobs)
        (hung,), _ = site.workers[:], await site.join()
        processes.stop(hung.pid("engine"))
        await wait_for(
            lambda: all(site.attempts(job) == 2 for job in jobs),
            LEASE_S * 2 + 5,
            "the other worker took the jobs of the hung one",
        )
        processes.resume(hung.pid("engine"))
        await site.audit()
        assert {site.attempts(job) for job in jobs} == {2}


async def test_a_stopped_broker_comes_back_fenced() -> None:
    async with open_site(2, STEP) as site:
        jobs = site.submit(12, 300)
        await site.running(jobs)
        processes.stop(site.workers[0].pid("broker"))
        await asyncio.sleep(LEASE_S * 2)
        processes.resume(site.workers[0].pid("broker"))
        await site.audit()
        assert all(site.attempts(job) <= 2 for job in jobs)


async def test_a_job_of_many_leases_runs_once_while_a_second_worker_looks_on() -> None:
    async with open_site(2, ("--set", "fake.step_ms=50")) as site:
        jobs = site.submit(2, int(LEASE_S * 2.5 / 0.05))
        await site.audit()
        assert {site.attempts(job) for job in jobs} == {1}


async def test_sigterm_under_load_gives_jobs_to_the_other_worker_at_once() -> None:
    """They are handed over, long before their leases are out. (Within a second, says the promise;
    `tokenbus bench chaos` measures it.)
    """
    async with open_site(1, (*STEP, *LONG_LEASE)) as site:
        jobs = site.submit(40, 600)
        await site.running(jobs)
        (leaving,), staying = site.workers[:], await site.join()
        assert site.owners(jobs) == {leaving.name}
        send(leaving.pid("supervisor"), signal.SIGTERM)
        assert leaving.process is not None
        log_file = leaving.process.log_file
        await wait_for(lambda: "ledger.draining" in log_file.read_text(), 10.0, "it drains")
        late = site.submit(5, 10, "late")
        await wait_for(
            lambda: site.owners(jobs) == {staying.name},
            LONG_LEASE_S / 2,
            "the other worker has the jobs",
        )
        assert await leaving.stop() == 0
        await site.audit()
        assert site.owners(late) == {staying.name}
        crashes = {site.client.hget(site.keys.job(job), "crashes") for job in jobs}
        assert crashes == {"0"}


async def test_the_job_that_kills_engines_is_alone_in_dead_and_63_bystanders_complete() -> None:
    settings = (*STEP, "--set", f"fake.crash_token={POISON}")
    async with open_site(2, settings) as site:
        site.submit(31, 100)
        evil = str(site.client.xadd(site.keys.jobs(), {"prompt": "a ~ b", "max_tokens": "5"}))
        site.submit(32, 100)
        await site.over([evil, *site.asked], timeout_s=90)
        assert site.last(evil)["code"] == "poisoned"
        await site.audit()
        (_, dead), *more = site.client.xrange(site.keys.dead)
        assert (more, dead["job"], dead["request.prompt"]) == ([], evil, "a ~ b")
        for worker in site.workers:
            assert not worker.lost


async def test_the_job_that_hangs_engines_is_alone_in_dead_and_its_neighbours_complete() -> None:
    """The engine's process lives, but no step ends: no lease is renewed, and the watchdog bites."""
    settings = (*STEP, "--set", f"fake.hang_token={POISON}", "--set", "engine_hang_ms=1500")
    async with open_site(2, settings) as site:
        jobs = site.submit(6, 100)
        await site.running(jobs)
        evil = str(site.client.xadd(site.keys.jobs(), {"prompt": "a ~ b", "max_tokens": "5"}))
        await site.over([evil, *jobs], timeout_s=90)
        assert site.last(evil)["code"] == "poisoned"
        await site.audit()
        assert site.client.xlen(site.keys.dead) == 1


async def test_two_workers_have_two_names_and_a_restarted_broker_keeps_its_own() -> None:
    async with open_site(2, STEP) as site:
        names = {worker.name for worker in site.workers}
        assert len(names) == 2
        jobs = site.submit(10, 100)
        await site.running(jobs)
        worker = site.workers[0]
        processes.kill(worker.pid("broker"))
        assert await worker.wait_ready(2, 30.0)
        assert worker.name in names
        await site.audit()
        consumers = site.client.xinfo_consumers(site.keys.jobs(), "workers")
        used = {str(consumer["name"]) for consumer in consumers}  # by those that took an entry
        assert used
        assert used <= names


@pytest.mark.parametrize("shift_s", [3600, -3600], ids=["ahead", "behind"])
async def test_a_worker_with_a_clock_an_hour_off_neither_steals_nor_misses(
    tmp_path: Path, shift_s: int
) -> None:
    """Deadlines and leases are by the server's clock and by monotonic clocks alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "real, real_ns = time.time, time.time_ns\n"
        f"time.time = lambda: real() + {shift_s}\n"
        f"time.time_ns = lambda: real_ns() + {shift_s * 10**9}\n"
    )
    for package in (broker, engine, kernels, ops, tokenbus):
        source = Path(str(package.__file__)).parent
        (tmp_path / source.name).symlink_to(source)
    settings = (*STEP, *LONG_LEASE, "--set", "engine.max_num_seqs=4")
    async with open_site(1, settings) as site:
        skewed = site.site.add_worker({"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"})
        await skewed.start()
        jobs = site.submit(12, 150, deadline_ms=60_000)
        await site.running(jobs)
        assert len(site.owners(jobs)) == 2
        overdue = str(
            site.client.xadd(
                site.keys.jobs(), {"prompt": "x", "max_tokens": "3000", "deadline_ms": "1500"}
            )
        )
        await site.over([overdue])
        assert site.last(overdue)["reason"] == "deadline"
        await site.audit()
        assert {site.attempts(job) for job in jobs} == {1}
