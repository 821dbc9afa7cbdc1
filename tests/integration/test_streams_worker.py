"""The Redis door in whole workers: real broker and engine processes (the fake model), real Redis.

Every test ends with the auditor: one terminal event, seqs without holes or repeats, the tokens of
an undisturbed run, nothing queued or pending.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from broker.config import RedisConfig
from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from tests.integration.worker import Worker, make_worker, running
from tests.redis_servers import RedisServer, find_servers
from tests.streams_kit import until
from tokenbus.events import crc32_of_ids
from tokenbus.keys import Keys

VOCAB = 512
LEASE_MS = 1_500
SLOW = FakeModel(vocab_size=VOCAB, step_ms=40.0)  # still at work when a second worker is up


@dataclass
class Site:
    """A Redis and any number of workers."""

    server: RedisServer
    client: redis.Redis
    stack: AsyncExitStack
    keys: Keys
    num_workers: int = 0

    async def worker(self, fake: FakeModel | None = None, drain_ms: int = 5_000) -> Worker:
        """A running worker, ready."""
        self.num_workers += 1
        directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tb-")))
        model = fake or FakeModel(vocab_size=VOCAB, step_ms=5.0)
        worker = make_worker(directory, fake=model, drain_ms=drain_ms)
        settings = RedisConfig(self.server.url, lease_ms=LEASE_MS, renew_ms=400, block_ms=300)
        worker.config = replace(
            worker.config, worker=f"w{self.num_workers}", zmq=None, redis=settings
        )
        await self.stack.enter_async_context(running(worker))
        self.stack.callback(end_engine, worker)
        return worker

    def submit(self, count: int, max_tokens: int, prompt: str = "hello") -> list[str]:
        """Jobs with prompts that differ."""
        jobs = []
        for i in range(count):
            fields = {"prompt": f"{prompt} {i}", "max_tokens": max_tokens}
            jobs.append(str(self.client.xadd(self.keys.jobs(), fields)))
        return jobs

    def ids(self, job: str) -> list[int]:
        """Tokens of a job, in order; fails on a hole or a repeat."""
        ids: list[int] = []
        for entry, fields in self.client.xrange(self.keys.out(job)):
            if fields["event"] == "tokens":
                assert int(fields["seq"]) == len(ids) + 1, (job, entry, len(ids))
                ids.extend(json.loads(fields["ids"]))
        return ids

    def last(self, job: str) -> dict[str, str]:
        """The last entry's fields; {} before any."""
        entries = self.client.xrevrange(self.keys.out(job), count=1)
        return entries[0][1] if entries else {}

    def is_over(self, job: str) -> bool:
        return self.last(job).get("event") in ("done", "error")

    def started(self, job: str) -> int:
        """How many attempts the job had."""
        entries = self.client.xrange(self.keys.out(job))
        return sum(fields["event"] == "started" for _, fields in entries)

    def audit(self, jobs: list[str], max_tokens: int, prompt: str = "hello") -> None:
        """See the module."""
        for i, job in enumerate(jobs):
            words = [f["event"] for _, f in self.client.xrange(self.keys.out(job))]
            assert sum(word in ("done", "error") for word in words) == 1, (job, words)
            done = self.last(job)
            assert done["event"] == "done", done
            ids = self.ids(job)
            assert ids == expected_tokens(list(f"{prompt} {i}".encode()), max_tokens, VOCAB), job
            assert int(done["crc"]) == crc32_of_ids(ids)
            assert json.loads(done["usage"])["completion_tokens"] == max_tokens
        self.audit_queue()

    def audit_queue(self) -> None:
        assert self.client.xlen(self.keys.jobs()) == 0
        assert self.client.xpending(self.keys.jobs(), "workers")["pending"] == 0


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    server = RedisServer(find_servers()[-1]).start()
    async with AsyncExitStack() as stack:
        client = server.client()
        yield Site(server, client, stack, Keys("default"))
    client.close()
    server.close()


def end_engine(worker: Worker) -> None:
    """An engine whose broker was killed waits for another one: nobody else would end it."""
    assert worker.broker is not None
    assert worker.engine is not None
    if worker.broker.returncode is not None and worker.engine.returncode is None:
        worker.engine.terminate()


async def kill_broker(worker: Worker) -> None:
    assert worker.broker is not None
    worker.broker.kill()
    await worker.broker.wait()


async def test_jobs_of_a_worker_come_out_whole(site: Site) -> None:
    await site.worker(FakeModel(vocab_size=VOCAB))
    jobs = site.submit(40, 30)
    await until(lambda: all(map(site.is_over, jobs)), 20)
    site.audit(jobs, 30)


REFUSED = [
    ({"input_ids": "[1, 512]"}, "invalid", "input_ids[1]"),
    ({"input_ids": json.dumps([1] * 100_000)}, "too_long", "input_ids"),
    ({"prompt": "a", "stop_token_ids": "[9999]"}, "invalid", "stop_token_ids[0]"),
    ({"prompt": "a", "temperature": "nan"}, "invalid", "temperature"),
    ({"prompt": "a", "model": "gpt-9"}, "unknown_model", "model"),
    ({"prompt": "a", "queue": "nightly"}, "unknown_queue", "queue"),
]


async def test_what_only_the_model_or_the_worker_can_refuse_costs_only_its_own_job(
    site: Site,
) -> None:
    await site.worker()
    good = site.submit(2, 60)
    bad = [str(site.client.xadd(site.keys.jobs(), fields)) for fields, _, _ in REFUSED]
    good += site.submit(2, 60)
    await until(lambda: all(map(site.is_over, good + bad)), 20)
    for job, (fields, code, field) in zip(bad, REFUSED, strict=True):
        error = site.last(job)
        assert (error["event"], error["code"], error.get("field")) == ("error", code, field), fields
    site.audit(good[:2], 60)
    site.audit(good[2:], 60)


async def test_a_killed_engine_is_a_pause_and_no_new_attempt(site: Site) -> None:
    worker = await site.worker()
    jobs = site.submit(10, 60)
    await until(lambda: all(site.ids(job) for job in jobs), 20)
    await worker.kill_engine()
    await worker.start_engine()
    await until(lambda: all(map(site.is_over, jobs)), 90)
    site.audit(jobs, 60)
    assert {site.started(job) for job in jobs} == {1}


async def test_a_killed_broker_leaves_its_jobs_to_another_worker(site: Site) -> None:
    first = await site.worker(SLOW)
    jobs = site.submit(10, 120)
    await until(lambda: all(site.ids(job) for job in jobs), 20)
    await kill_broker(first)
    lease_end = time.monotonic() + LEASE_MS / 1000
    await site.worker()
    free_at = max(lease_end, time.monotonic())
    await until(lambda: all(site.started(job) == 2 or site.is_over(job) for job in jobs), 20)
    assert time.monotonic() - free_at < 3.0  # a look each quarter of the lease; a busy box
    await until(lambda: all(map(site.is_over, jobs)), 90)
    site.audit(jobs, 120)


async def test_sigterm_hands_running_jobs_over_within_a_second(site: Site) -> None:
    first = await site.worker(SLOW, drain_ms=300)
    jobs = site.submit(5, 300)
    await until(lambda: all(site.ids(job) for job in jobs), 20)
    await site.worker()
    assert first.broker is not None
    first.broker.send_signal(signal.SIGTERM)
    sent_at = time.monotonic()
    await until(lambda: all(site.started(job) == 2 for job in jobs), 10)
    assert time.monotonic() - sent_at < 0.3 + 1.0 + 0.5  # drain, hand-over, a busy box
    assert await first.broker.wait() == 0
    await until(lambda: all(map(site.is_over, jobs)), 90)
    site.audit(jobs, 300)
    hashes = [site.client.hgetall(site.keys.job(job)) for job in jobs]
    assert {fields["crashes"] for fields in hashes} == {"0"}


async def test_a_job_that_kills_engines_is_alone_in_the_dead_stream(site: Site) -> None:
    """Each engine takes longer to come than a lease lasts, while another worker looks on. The jobs
    wait where it is known whom to suspect: nobody else has to charge the crash to all of them.
    """
    poison_id = ord("~")
    model = FakeModel(vocab_size=VOCAB, step_ms=5.0, crash_token=poison_id)
    worker = await site.worker(model)
    good = site.submit(6, 400)
    await until(lambda: all(site.ids(job) for job in good), 20)
    bad = str(site.client.xadd(site.keys.jobs(), {"prompt": "kill ~", "max_tokens": 5}))
    for deaths in range(1, 4):
        assert worker.engine is not None
        assert await asyncio.wait_for(worker.engine.wait(), 30) == -signal.SIGKILL
        if deaths == 1:
            await site.worker(model)
        await asyncio.sleep(1.5 * LEASE_MS / 1000)  # nothing may happen now
        await worker.start_engine()
    await until(lambda: site.is_over(bad), 30)
    error = site.last(bad)
    assert (error["code"], error["retry"]) == ("poisoned", "false")
    await until(lambda: all(map(site.is_over, good)), 90)
    site.audit(good, 400)
    assert {site.started(job) for job in (bad, *good)} == {1}
    hashes = [site.client.hgetall(site.keys.job(job)) for job in good]
    assert {fields["crashes"] for fields in hashes} == {"0"}
    (_, dead), *more = site.client.xrange(site.keys.dead)
    assert (more, dead["job"], dead["request.prompt"]) == ([], bad, "kill ~")


async def test_a_hung_engine_loses_its_jobs_to_another_worker(site: Site) -> None:
    hung = await site.worker(SLOW)
    jobs = site.submit(4, 300)
    await until(lambda: all(site.ids(job) for job in jobs), 20)
    await site.worker()
    assert hung.engine is not None
    os.kill(hung.engine.pid, signal.SIGSTOP)
    try:
        await until(lambda: all(map(site.is_over, jobs)), 90)
        site.audit(jobs, 300)
        assert {site.started(job) for job in jobs} == {2}
    finally:
        os.kill(hung.engine.pid, signal.SIGCONT)
    more = site.submit(6, 20, "more")
    await until(lambda: all(map(site.is_over, more)), 20)
    site.audit(more, 20, "more")
