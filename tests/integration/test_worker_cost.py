"""What a worker costs that serves nobody, and one that has served many."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from ops.worker_process import WorkerProcess, run_worker
from tokenbus import AsyncClient

NUM_JOBS = 5_000
WARM_JOBS = 2_000  # until then tables and pools grow to the size that they keep
AT_ONCE = 50
MAX_GROWTH_BYTES = 2 << 20
IDLE_S = 3.0
PROCESSES = ("broker", "engine")


async def run_jobs(clients: list[AsyncClient], count: int) -> None:
    """Streams of 16 tokens through all clients in turn, AT_ONCE at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def run_job(number: int) -> int:
        async with room:
            stream = clients[number % len(clients)].generate(f"job {number}", max_tokens=16)
            return sum([len(tokens.ids) async for tokens in stream])

    lengths = await asyncio.gather(*map(run_job, range(count)))
    assert set(lengths) == {16}


def resident_bytes(worker: WorkerProcess) -> dict[str, int]:
    """Memory of the two processes."""
    return {name: psutil.Process(worker.pids[name]).memory_info().rss for name in PROCESSES}


@pytest.mark.slow
async def test_memory_is_flat_over_five_thousand_jobs(tmp_path: Path) -> None:
    """Redis is not looked at: it keeps each answer for an hour."""
    async with (
        run_worker(tmp_path, ("--model", "fake")) as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        clients = [over_zmq, over_redis]
        await run_jobs(clients, WARM_JOBS)
        before = resident_bytes(worker)
        await run_jobs(clients, NUM_JOBS - WARM_JOBS)
        after = resident_bytes(worker)
    growth = {name: after[name] - before[name] for name in PROCESSES}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth


async def test_an_idle_worker_costs_less_than_three_percent_of_a_core(tmp_path: Path) -> None:
    async with run_worker(tmp_path, ("--model", "fake")) as worker:
        processes = [psutil.Process(worker.pids[name]) for name in PROCESSES]
        await asyncio.sleep(1.0)  # what follows the ready line is no idleness
        before_s = [sum(process.cpu_times()[:2]) for process in processes]
        begin_s = time.monotonic()
        await asyncio.sleep(IDLE_S)
        used_s = sum(sum(p.cpu_times()[:2]) for p in processes) - sum(before_s)
        passed_s = time.monotonic() - begin_s
    assert used_s / passed_s < 0.03
