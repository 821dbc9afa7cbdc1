"""The take-over part of the bus benchmark: how long the jobs of a killed worker stand still until
another one goes on with them, at the default lease.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import redis

from broker.config import RedisConfig
from ops.bench.bus_redis import BLOCK_MS, KEYS, BenchRedis
from ops.bench.bus_worker import BusWorker

JOBS = 8
STEP_MS = 50.0
MAX_TOKENS = 4_000  # more than any job can make before it is cancelled


def measure_takeover(server: BenchRedis, num_rounds: int) -> dict[str, float]:
    """kill -9 of a broker with running jobs, at a random time after a renewal; another worker is
    idle. From the kill to the `started` of the next attempt, and to its first token. Seconds, over
    all jobs of all rounds. Who took over is the next round's victim.
    """
    started_s: list[float] = []
    token_s: list[float] = []
    config = RedisConfig(server.url)
    with ExitStack() as stack, server.client() as client:
        victim = _worker(stack, server, 0)
        for i in range(num_rounds):
            jobs = [f"round-{i}-job-{k}" for k in range(JOBS)]
            for job in jobs:
                fields: dict[Any, Any] = {"job": job, "prompt": job, "max_tokens": MAX_TOKENS}
                client.xadd(KEYS.jobs(), fields)
            _await_tokens(client, jobs, 1)
            heir = _worker(stack, server, i + 1)
            time.sleep(random.uniform(0.0, config.renew_ms / 1000))
            killed_s = time.monotonic()
            os.kill(victim.broker_pid, signal.SIGKILL)
            started, first = _await_tokens(client, jobs, 2)
            started_s += [at_s - killed_s for at_s in started]
            token_s += [at_s - killed_s for at_s in first]
            for job in jobs:
                wish: dict[Any, Any] = {"op": "cancel", "job": job}
                client.xadd(KEYS.control, wish)
            _await_ends(client, jobs)
            victim = heir
    return {
        "rounds": num_rounds,
        "jobs": len(started_s),
        "lease_s": config.lease_ms / 1000,
        "next_attempt_p50_s": round(float(np.median(started_s)), 2),
        "next_attempt_max_s": round(max(started_s), 2),
        "next_token_p50_s": round(float(np.median(token_s)), 2),
        "next_token_max_s": round(max(token_s), 2),
    }


def _worker(stack: ExitStack, server: BenchRedis, number: int) -> BusWorker:
    worker = stack.enter_context(BusWorker(redis_url=server.url, name=f"bench-{number}"))
    worker.start_engine(max_num_seqs=JOBS, step_ms=STEP_MS)
    return worker


def _await_tokens(
    client: redis.Redis, jobs: list[str], attempt: int
) -> tuple[list[float], list[float]]:
    """When each job's `started` of this attempt was seen, and the first tokens after it."""
    started_s: dict[bytes, float] = {}
    token_s: dict[bytes, float] = {}
    cursors: Any = {KEYS.out(job).encode(): f"{attempt - 1}-{2**40}" for job in jobs}
    while cursors:
        reply: Any = client.xread(cursors, block=2 * BLOCK_MS)
        now_s = time.monotonic()
        if not reply:
            raise RuntimeError(f"no attempt {attempt} within {2 * BLOCK_MS} ms")
        for name, entries in reply:
            cursors[name] = entries[-1][0]
            started_s.setdefault(name, now_s)
            if entries[-1][1][b"event"] == b"tokens":
                token_s[name] = now_s
                del cursors[name]
    return list(started_s.values()), list(token_s.values())


def _await_ends(client: redis.Redis, jobs: list[str]) -> None:
    cursors: Any = {KEYS.out(job).encode(): "0" for job in jobs}
    while cursors:
        reply: Any = client.xread(cursors, block=BLOCK_MS)
        for name, entries in reply or ():
            cursors[name] = entries[-1][0]
            if entries[-1][1][b"event"] == b"done":
                del cursors[name]
