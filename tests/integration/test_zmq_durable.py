"""Durable jobs over ZeroMQ: they go through Redis, run on any worker, and outlive them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.config import RedisConfig, ZmqConfig
from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from tests.integration.worker import Worker, make_worker
from tests.integration.zmq_raw import RawClient, Reply, letters_of, take
from tests.redis_servers import RedisServer, find_servers
from tokenbus.client import AsyncClient
from tokenbus.keys import Keys
from tokenbus.protocol import MessageType as T

VOCAB = 512
KEYS = Keys("default")
QUICK = ZmqConfig("", heartbeat_ms=200, gone_ms=1_000)

pytestmark = pytest.mark.timeout(60)


def expect(text: str, count: int) -> list[int]:
    return expected_tokens([b % VOCAB for b in text.encode()], count, VOCAB)


@dataclass
class Site:
    """Workers on one Redis. The jobs of a worker without an engine run elsewhere."""

    directory: Path
    redis: RedisServer
    workers: list[Worker] = field(default_factory=list)

    async def worker(
        self, name: str, *, has_engine: bool = True, step_ms: float = 3.0, **options: Any
    ) -> Worker:
        directory = self.directory / name
        directory.mkdir()
        config = RedisConfig(
            self.redis.url, lease_ms=1_500, renew_ms=300, block_ms=200, queue_limit=50
        )
        fake = FakeModel(vocab_size=VOCAB, step_ms=step_ms)
        worker = make_worker(directory, fake=fake, redis=config, name=name, **options)
        self.workers.append(worker)
        await worker.start_broker()
        if has_engine:
            await worker.start_engine()
            await worker.wait_for("ready")
        return worker

    async def facts(self, job: str) -> dict[str, str]:
        """The job's hash."""
        with self.redis.client() as client:
            fields: dict[str, str] = client.hgetall(KEYS.job(job))
        return fields

    async def until_ended(self, job: str) -> dict[str, str]:
        async with asyncio.timeout(20):
            while (fields := await self.facts(job)).get("state") not in ("done", "failed"):
                await asyncio.sleep(0.02)
        return fields

    async def until_connected(self, worker: Worker) -> None:
        """The worker's Redis door does its work."""
        async with RawClient(worker.endpoint) as client, asyncio.timeout(20):
            await client.hello()
            while True:
                await client.send(T.STATS, job="nobody-knows")
                answer = await client.receive(T.ERROR)
                if answer.body["code"] == "not_found":
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    redis = RedisServer(find_servers()[-1]).start()
    site = Site(tmp_path, redis)
    try:
        yield site
    finally:
        redis.resume()
        for worker in site.workers:
            with contextlib.suppress(ProcessLookupError):
                await worker.stop()
        redis.close()


async def test_a_durable_job_of_one_worker_runs_on_another(site: Site) -> None:
    front = await site.worker("front", has_engine=False)
    await site.worker("back")
    await site.until_connected(front)
    async with RawClient(front.endpoint) as client:
        await client.hello()
        reply = await client.run(job="j", prompt="hello", max_tokens=40, durable=True)
        ids = expect("hello", 40)
        assert (reply.ids, reply.text) == (ids, letters_of(ids))
        assert reply.body["reason"] == "length"
        assert reply.accepted is not None
        assert (reply.accepted["prompt_tokens"], reply.accepted["seq"]) == (5, 0)
    assert (await site.facts("j"))["worker"] == "back"


async def test_kill_of_the_clients_broker_leaves_no_hole_and_repeats_nothing(site: Site) -> None:
    front = await site.worker("front", has_engine=False, zmq=QUICK)
    await site.worker("back")
    await site.until_connected(front)
    async with AsyncClient(zmq=front.endpoint) as client:
        streams = [
            client.generate(f"job {i}", max_tokens=300, durable=True, job=f"j{i}") for i in range(5)
        ]
        got: dict[str, list[int]] = {stream.job: [] for stream in streams}
        texts = dict.fromkeys(got, "")

        async def read(index: int) -> None:
            async for token in streams[index]:
                assert token.seq == len(got[f"j{index}"]) + 1 or not token.ids
                got[f"j{index}"] += token.ids
                texts[f"j{index}"] += token.text

        readers = [asyncio.create_task(read(i)) for i in range(5)]
        async with asyncio.timeout(20):
            while any(len(ids) < 30 for ids in got.values()):
                await asyncio.sleep(0.01)
        await front.kill_broker()
        await front.start_broker()
        async with asyncio.timeout(30):
            await asyncio.gather(*readers)
    for i in range(5):
        ids = expect(f"job {i}", 300)
        assert got[f"j{i}"] == ids
        assert texts[f"j{i}"] == letters_of(ids)


async def test_kill_of_the_worker_that_runs_it_is_a_pause_for_the_client(site: Site) -> None:
    front = await site.worker("front", has_engine=False)
    back = await site.worker("back", step_ms=5.0)
    third = await site.worker("third", has_engine=False)
    await site.until_connected(front)
    async with RawClient(front.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="hello", max_tokens=120, durable=True)
        replies = {job: Reply()}
        while len(replies[job].ids) < 20:
            take(replies, await client.next())
        await back.kill_broker()
        await back.kill_engine()
        site.workers.remove(back)
        await third.start_engine()
        while replies[job].end is None:
            take(replies, await client.next())
        ids = expect("hello", 120)
        assert (replies[job].ids, replies[job].text) == (ids, letters_of(ids))
        assert replies[job].body["attempt"] == 2


async def test_a_client_that_is_gone_cancels_no_durable_job(site: Site) -> None:
    worker = await site.worker("w", step_ms=15.0, zmq=QUICK)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        await client.submit("kept", prompt="a", max_tokens=200, durable=True)
        await client.submit("lost", prompt="a", max_tokens=200)
        for _ in range(2):
            await client.receive(T.ACCEPTED)
    assert (await site.until_ended("kept"))["completion_tokens"] == "200"
    async with RawClient(worker.endpoint) as other:
        await other.hello()
        await other.send(T.RESUME, job="kept", after=0)
        reply = (await other.collect("kept"))["kept"]
        assert reply.ids == expect("a", 200)
        await other.send(T.RESUME, job="lost", after=0)
        assert (await other.collect("lost"))["lost"].body["reason"] == "cancelled"


async def test_a_job_is_resumed_at_another_worker_than_it_was_sent_to(site: Site) -> None:
    first, second = await site.worker("a"), await site.worker("b")
    async with RawClient(first.endpoint) as client:
        await client.hello()
        whole = await client.run(job="j", prompt="hello", max_tokens=30, durable=True)
    async with RawClient(second.endpoint) as client:
        await client.hello()
        await client.send(T.RESUME, job="j", after=0)
        assert (await client.collect("j"))["j"].ids == whole.ids
        await client.send(T.STATS, job="j")
        body = (await client.receive(T.STATS)).body
        assert (body["state"], body["reason"], body["seq"]) == ("done", "length", 30)
        for after, code in ((31, "gone"), (30, None)):
            await client.send(T.RESUME, job="j", after=after)
            answer = await client.receive(T.ERROR, T.DONE, job="j")
            assert answer.body.get("code") == code
        await client.send(T.RESUME, job="nobody-knows", after=0)
        assert (await client.receive(T.ERROR)).body["code"] == "not_found"


async def test_the_same_submit_runs_once_and_another_of_its_name_is_a_conflict(site: Site) -> None:
    first, second = await site.worker("a"), await site.worker("b")
    body = {"job": "j", "prompt": "hello", "max_tokens": 30, "durable": True}
    async with RawClient(first.endpoint) as one, RawClient(second.endpoint) as two:
        await one.hello()
        await two.hello()
        replies = [await one.run(**body), await one.run(**body), await two.run(**body)]
        later = await two.run(**body, deadline_ms=60_000)  # less time left, the same job
        assert [reply.ids for reply in (*replies, later)] == [expect("hello", 30)] * 4
        for client in (one, two):
            other = await client.run(**{**body, "prompt": "other"})
            assert (other.body["code"], other.body["field"]) == ("conflict", "job")
    assert (await site.facts("j"))["attempt"] == "1"


@pytest.mark.parametrize("at", ["its_worker", "another_worker"])
async def test_cancel_at(site: Site, at: str) -> None:
    front = await site.worker("front", has_engine=False)
    back = await site.worker("back")
    await site.until_connected(front)
    async with RawClient(front.endpoint) as client, RawClient(back.endpoint) as other:
        await client.hello()
        await other.hello()
        job = await client.submit(prompt="hello", max_tokens=100_000, durable=True)
        replies = {job: Reply()}
        while len(replies[job].ids) < 10:
            take(replies, await client.next())
        await (client if at == "its_worker" else other).send(T.CANCEL, job=job)
        while replies[job].end is None:
            take(replies, await client.next())
        assert replies[job].body["reason"] == "cancelled"
        if at == "another_worker":
            assert (await other.receive(T.DONE, job=job)).body["reason"] == "cancelled"


async def test_without_credit_a_durable_job_waits_in_redis(site: Site) -> None:
    worker = await site.worker("w", step_ms=0.0, zmq=ZmqConfig("", log_tokens_per_job=200))
    async with RawClient(worker.endpoint) as client:
        await client.hello(credit=1)
        job = await client.submit(prompt="hello", max_tokens=3_000, durable=True)
        await site.until_ended(job)  # the relay waits, not the job
        assert (await client.receive(T.TOKENS)).body["events"][0][2] == 1
        replies = {job: Reply()}
        take(replies, client.messages[-1])
        await client.send(T.CREDIT, total=1_000)
        while replies[job].end is None:
            take(replies, await client.next())
        assert replies[job].ids == expect("hello", 3_000)


async def test_an_urgent_job_of_redis_passes_a_backlog_of_zeromq_jobs(site: Site) -> None:
    worker = await site.worker("w", max_num_seqs=2)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        backlog = [await client.submit(prompt=f"b{i}", max_tokens=200) for i in range(20)]
        await client.receive(T.ACCEPTED, job=backlog[-1])
        for job in ("first", "j"):  # the first may come with a read that began before the backlog
            await client.submit(job=job, prompt=job, max_tokens=5, durable=True, priority="high")
            await client.receive(T.ACCEPTED, job=job)
        await client.receive(T.DONE, job="j")
        assert sum(message.type is T.DONE for message in client.messages) < 12


async def test_a_bad_durable_job_is_rejected_and_a_full_queue_says_busy(site: Site) -> None:
    front = await site.worker("front", has_engine=False)
    await site.until_connected(front)
    async with RawClient(front.endpoint) as client:
        await client.hello()
        jobs = [await client.submit(prompt="hello", max_tokens=2, durable=True) for _ in range(50)]
        late = await client.run(prompt="hello", durable=True)
        assert (late.body["code"], late.body["retry"]) == ("busy", True)
        have = await client.run(prompt="a", durable=True, have=[1], seed=1)
        assert (have.body["code"], have.body["field"]) == ("unsupported", "have")
        await site.worker("back")
        for reply in (await client.collect(*jobs)).values():
            assert reply.ids == expect("hello", 2)
        bad = await client.run(input_ids=[VOCAB], durable=True)
        assert bad.end is not None
        assert (bad.end.type, bad.body["code"]) == (T.REJECTED, "invalid")
        assert bad.body["field"] == "input_ids[0]"


async def test_while_redis_is_away_durable_jobs_are_refused_and_open_ones_wait(site: Site) -> None:
    worker = await site.worker("w", step_ms=5.0)
    async with RawClient(worker.endpoint) as client, RawClient(worker.endpoint) as other:
        await client.hello()
        await other.hello()
        job = await client.submit(prompt="hello", max_tokens=150, durable=True)
        replies = {job: Reply()}
        while len(replies[job].ids) < 10:
            take(replies, await client.next())
        num_before = sum(line["event"] == "not_ready" for line in worker.status)
        site.redis.kill()
        await worker.wait_for("not_ready", num_before + 1)
        refused = (await other.run(prompt="a", durable=True)).body
        assert (refused["code"], refused["retry"], refused["retry_ms"]) == ("busy", True, 1_000)
        assert (await other.run(prompt="a", max_tokens=3)).ids == expect("a", 3)  # not durable
        site.redis.start()
        while replies[job].end is None:
            take(replies, await client.next())
        assert replies[job].ids == expect("hello", 150)
