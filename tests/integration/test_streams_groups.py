"""Redis as more than one server: a cluster, and a master with a replica under a Sentinel; for the
worker and for its clients.
"""

from __future__ import annotations

import asyncio

from tests.redis_groups import HALF, cluster_of_two, watched_pair
from tests.redis_servers import ServerBinary
from tests.streams_kit import Worker, text_of, until
from tokenbus import AsyncClient


async def test_a_cluster_url_finds_the_node_of_the_queue(redis_binary: ServerBinary) -> None:
    async with cluster_of_two(redis_binary) as (first, second):
        for queue in ("a", "b", "c", "d"):
            url = f"redis+cluster://127.0.0.1:{first.port},127.0.0.1:1"
            worker = await Worker(url, queue, "w").start()
            key = f"tokenbus:{{{queue}}}:jobs"
            with first.client() as one, second.client() as two:
                owner = one if int(one.cluster("keyslot", key)) < HALF else two
                job = owner.xadd(key, {"prompt": "x", "max_tokens": 1})
                await until(lambda w=worker, j=job: j in w.ledger.runs)
            await worker.stop()


async def test_a_queue_whose_slot_moves_to_another_node_goes_on_there(
    redis_binary: ServerBinary,
) -> None:
    """Key by key under running jobs: what is gone is answered with ASK, what is half gone with
    TRYAGAIN, and afterwards everything with MOVED.
    """
    async with cluster_of_two(redis_binary) as (first, second):
        with first.client() as one, second.client() as two:
            jobs_key = "tokenbus:{q}:jobs"
            slot = int(one.cluster("keyslot", jobs_key))
            old, new, new_server = (one, two, second) if slot < HALF else (two, one, first)
            worker = await Worker(f"redis+cluster://127.0.0.1:{first.port}", "q", "w").start()
            fields = [{"prompt": str(i), "max_tokens": 20} for i in range(4)]
            jobs = [str(old.xadd(jobs_key, each)) for each in fields]
            await until(lambda: all(job in worker.ledger.runs for job in jobs))
            for job in jobs:
                worker.ledger.step(job, 2)
            old_id, new_id = old.cluster("myid"), new.cluster("myid")
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
            seconds = iter(jobs)
            while keys := old.cluster("getkeysinslot", slot, 1):
                old.migrate("127.0.0.1", new_server.port, keys, 0, 5_000)
                if (job := next(seconds, None)) is not None:
                    worker.ledger.step(job, 2)
                await asyncio.sleep(0.02)
            for node in (new, old):
                node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            for job in jobs:
                worker.ledger.step(job, 2)
            more = str(new.xadd(jobs_key, {"prompt": "more", "max_tokens": 3}))
            await until(lambda: more in worker.ledger.runs, 20)
            for job in (*jobs, more):
                worker.ledger.finish(job)
            await until(lambda: worker.door.num_jobs == 0, 20)
            for job in jobs:
                entries = new.xrange(f"tokenbus:{{q}}:out:{job}")
                text = "".join(fields.get("text", "") for _, fields in entries)
                assert text == text_of(6), entries
                assert [fields["event"] for _, fields in entries].count("started") == 1
                assert entries[-1][1]["event"] == "done"
            assert new.xlen(jobs_key) == 0
            await worker.stop()


async def test_a_sentinel_url_follows_the_master(redis_binary: ServerBinary) -> None:
    async with watched_pair(redis_binary) as pair:
        worker = await Worker(pair.url, "q", "w").start()
        job = pair.master.client().xadd("tokenbus:{q}:jobs", {"prompt": "x", "max_tokens": 9})
        await until(lambda: job in worker.ledger.runs)
        worker.ledger.step(job, 2)
        replica = pair.replica.client()
        await until(lambda: replica.xlen(f"tokenbus:{{q}}:out:{job}") == 2)
        pair.master.kill()
        await until(lambda: not worker.monitor.is_ready)
        await until(lambda: worker.monitor.is_ready, timeout_s=20)
        worker.ledger.step(job, 2)
        await until(lambda: replica.xlen(f"tokenbus:{{q}}:out:{job}") == 3)
        worker.ledger.finish(job)
        await until(lambda: worker.door.num_jobs == 0)
        entries = [fields for _, fields in replica.xrange(f"tokenbus:{{q}}:out:{job}")]
        assert [fields["event"] for fields in entries] == ["started", *2 * ["tokens"], "done"]
        assert "".join(fields.get("text", "") for fields in entries) == text_of(4)
        assert replica.xpending("tokenbus:{q}:jobs", "workers")["pending"] == 0
        await worker.stop()


async def test_a_client_with_a_sentinel_url_reads_on_at_the_new_master(
    redis_binary: ServerBinary,
) -> None:
    async with watched_pair(redis_binary) as pair:
        worker = await Worker(pair.url, "q", "w").start()
        async with AsyncClient(redis=pair.url, queue="q") as client:
            stream = client.generate("x", max_tokens=9, job="j")
            reading = asyncio.create_task(stream.text())
            await until(lambda: "j" in worker.ledger.runs)
            worker.ledger.step("j", 4)
            await until(lambda: pair.replica.client().xlen("tokenbus:{q}:out:j") == 2)
            pair.master.kill()
            await until(lambda: not worker.monitor.is_ready)
            await until(lambda: worker.monitor.is_ready, timeout_s=20)
            worker.ledger.step("j", 5)
            worker.ledger.finish("j")
            assert await asyncio.wait_for(reading, 20) == text_of(9)
            assert stream.done is not None
            assert stream.done.reason == "length"
            worker.ledger.is_automatic = True
            assert await client.generate("again", max_tokens=3).text() == text_of(3)
        await worker.stop()


async def test_a_client_with_a_cluster_url_sends_reads_and_cancels(
    redis_binary: ServerBinary,
) -> None:
    async with cluster_of_two(redis_binary) as (first, _):
        url = f"redis+cluster://127.0.0.1:{first.port}"
        for queue in ("a", "b", "c"):  # on either node
            worker = await Worker(url, queue, "w").start()
            async with AsyncClient(redis=url, queue=queue) as client:
                worker.ledger.is_automatic = True
                assert await client.generate("x", max_tokens=6).text() == text_of(6)
                worker.ledger.is_automatic = False
                job = await client.submit("y", max_tokens=6)
                await until(lambda w=worker, j=job: j in w.ledger.runs)
                assert (await client.status(job)).state == "running"
                await client.cancel(job)
                stream = client.tail(job)
                await asyncio.wait_for(stream.text(), 10)
                assert stream.done is not None
                assert stream.done.reason == "cancelled"
            await worker.stop()
