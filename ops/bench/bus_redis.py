"""The Redis part of the bus benchmark: jobs a second with their replies, token events, latency of
both directions. The client is plain redis-py: XADD, and one XREAD over all open jobs.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

import redis

from broker.ring.records import Kind, encode_step
from ops.bench.bus_floor import percentiles
from ops.bench.bus_worker import BenchEngine, BusWorker, cpu_s
from ops.bench.bus_zmq import one_token
from ops.embedded_redis import find_binary
from tokenbus.keys import Keys

KEYS = Keys("bench")
BLOCK_MS = 20_000


class BenchRedis:
    """A redis-server of the benchmark's own on loopback TCP, without persistence."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tokenbus-bench-redis-")
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._directory.name)
        argv = [str(find_binary()), *where, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        with self.client() as client:
            for _ in range(500):
                try:
                    client.ping()
                    return self
                except redis.ConnectionError:
                    time.sleep(0.01)
        raise RuntimeError("the benchmark's redis-server does not answer")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._directory.cleanup()

    def client(self) -> redis.Redis:
        """A connection."""
        return redis.Redis(port=self.port)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process.pid


class BenchReader:
    """Submits jobs and follows all that are open. `num_tokens`, `num_entries`: of what was read."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._cursors: dict[bytes, bytes] = {}
        self.num_tokens = self.num_entries = self.num_done = 0

    @property
    def num_open(self) -> int:
        """Jobs without their end."""
        return len(self._cursors)

    def submit(self, jobs: range, **fields: Any) -> None:
        """One entry a job, in one pipeline."""
        pipe = self._client.pipeline(transaction=False)
        for i in jobs:
            entry: dict[Any, Any] = {"job": f"job-{i}", **fields}
            pipe.xadd(KEYS.jobs(), entry)
            self._cursors[KEYS.out(f"job-{i}").encode()] = b"0"
        pipe.execute()

    def read(self) -> None:
        """Wait for what is new in any open stream, and count it."""
        streams: Any = self._cursors
        reply: Any = self._client.xread(streams, block=BLOCK_MS)
        if not reply:
            raise RuntimeError(f"no event within {BLOCK_MS} ms")
        for name, entries in reply:
            self._cursors[name] = entries[-1][0]
            self.num_entries += len(entries)
            for _, fields in entries:
                event = fields[b"event"]
                if event == b"tokens":
                    self.num_tokens += fields[b"ids"].count(b",") + 1
                elif event in (b"done", b"error"):
                    self.num_done += 1
                    del self._cursors[name]


def measure_jobs(server: BenchRedis, num_jobs: int, window: int) -> dict[str, float]:
    """One-token jobs with their replies, up to `window` of them open at a time."""
    with BusWorker(redis_url=server.url) as worker, server.client() as client:
        worker.start_engine(max_num_seqs=window)
        reader = BenchReader(client)
        pids = {"broker": worker.broker_pid, "engine": worker.engine_pid, "redis": server.pid}
        used_s = {name: cpu_s(pid) for name, pid in pids.items()}
        start_s = time.perf_counter()
        sent = 0
        while reader.num_done < num_jobs:
            more = min(window - reader.num_open, num_jobs - sent)
            if more:
                reader.submit(range(sent, sent + more), prompt="hello", max_tokens=1)
                sent += more
            reader.read()
        elapsed_s = time.perf_counter() - start_s
        used_s = {name: cpu_s(pid) - used_s[name] for name, pid in pids.items()}
    costs = {f"{name}_us_per_job": round(1e6 * s / num_jobs) for name, s in used_s.items()}
    return {"jobs": num_jobs, "jobs_per_s": round(num_jobs / elapsed_s), **costs}


def measure_events(server: BenchRedis, num_jobs: int, num_tokens: int) -> dict[str, float]:
    """All jobs at once at full speed of the fake model; one reader."""
    with BusWorker(redis_url=server.url) as worker, server.client() as client:
        worker.start_engine(max_num_seqs=num_jobs)
        reader = BenchReader(client)
        broker_s = cpu_s(worker.broker_pid)
        start_s = time.perf_counter()
        reader.submit(range(num_jobs), prompt="hello", max_tokens=num_tokens)
        while reader.num_open:
            reader.read()
        elapsed_s = time.perf_counter() - start_s
        broker_s = cpu_s(worker.broker_pid) - broker_s
    return {
        "tokens": reader.num_tokens,
        "entries": reader.num_entries,
        "tokens_per_s": round(reader.num_tokens / elapsed_s),
        "broker_us_per_token": round(1e6 * broker_s / reader.num_tokens, 2),
    }


def measure_latency(server: BenchRedis, num_jobs: int) -> dict[str, float]:
    """One job at a time on an idle worker; the benchmark plays the engine, on the same clock.

    submit: from XADD to the SUBMIT record in the engine's hand. token: from the STEP record's write
    to the entry in the hand of a reader that waits in XREAD. Microseconds.
    """
    submit_us, token_us = [], []
    with (
        BusWorker(redis_url=server.url) as worker,
        BenchEngine(worker.link_path) as engine,
        server.client() as client,
    ):
        worker.wait_for("ready")
        for i in range(num_jobs):
            start_ns = time.perf_counter_ns()
            client.xadd(KEYS.jobs(), {"job": f"job-{i}", "prompt": "hello world", "max_tokens": 1})
            rid, _ = engine.await_submit()
            submit_us.append((time.perf_counter_ns() - start_ns) / 1e3)
            out = KEYS.out(f"job-{i}")
            record = encode_step(one_token(i, rid))
            write_ns = time.perf_counter_ns()
            engine.write(Kind.STEP, record)
            client.xread({out: "1-0"}, block=BLOCK_MS)
            token_us.append((time.perf_counter_ns() - write_ns) / 1e3)
            client.xread({out: "1-1"}, block=BLOCK_MS)
    return {**percentiles("submit", submit_us), **percentiles("token", token_us)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
