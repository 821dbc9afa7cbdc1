"""What the chaos benchmark breaks: one Redis, and workers that reach it over a proxy each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from ops.bench.chaos_proxy import TcpProxy
from ops.embedded_redis import find_binary
from ops.worker_process import WorkerFailed, WorkerProcess, run_worker

START_S = 20.0
QUEUE = "chaos"


class Redis:
    """A redis-server child on a unix socket, with an append-only file: kill -9 loses nothing."""

    def __init__(self, directory: Path, binary: Path) -> None:
        self._directory = directory
        self._binary = binary
        self.socket_path = str(directory / "redis.sock")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The direct way in, without a proxy."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "redis is not started"
        return self._process.pid

    def client(self) -> redis.Redis:
        """A connection for the auditor: replies as text."""
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=10)

    def version(self) -> str:
        """As the server says."""
        with self.client() as client:
            return str(client.info("server")["redis_version"])

    def start(self) -> None:
        """Start it; returns at the first PONG."""
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    *("--port", "0", "--unixsocket", self.socket_path),
                    *("--dir", str(self._directory), "--save", ""),
                    *("--appendonly", "yes", "--maxmemory-policy", "noeviction"),
                ],
                stdout=log,
                stderr=log,
                restore_signals=False,  # SIGXFSZ stays ignored: a full disk is an error, no death
            )
        deadline_s = time.monotonic() + START_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if time.monotonic() > deadline_s or self._process.poll() is not None:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        """kill -9, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        if self._process is not None:
            self._process.send_signal(number)


@dataclass(eq=False)
class Worker:
    """One worker's place: its processes come and go, directory, endpoint and proxy stay."""

    directory: Path
    proxy: TcpProxy
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    process: WorkerProcess | None = None
    num_ready: int = 0  # ready and restarted events so far, over all lives
    ready_at_s: float = 0.0
    lost: str = ""  # why its supervisor ended although nobody asked
    is_stopping: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _listener: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """Where its ZeroMQ clients find it, in every life."""
        return f"ipc://{self.directory}/zmq.sock"

    @property
    def name(self) -> str:
        """The name of its present life; empty while it has none."""
        return str(self.process.ready["worker"]) if self.process else ""

    def pid(self, part: str) -> int:
        """Process id of supervisor, broker or engine."""
        assert self.process is not None, "the worker is not started"
        return self.process.pids[part]

    async def start(self) -> None:
        """A new life; returns when it is ready. Raises WorkerFailed."""
        url = f"redis://127.0.0.1:{self.proxy.port}"
        doors = ("--redis", url, "--zmq", self.endpoint, "--queue", QUEUE)
        self._stack = contextlib.AsyncExitStack()
        self.is_stopping, self.lost = False, ""
        worker = run_worker(self.directory, (*doors, *self.arguments), self.environment)
        self.process = await self._stack.enter_async_context(worker)
        self._note_ready()
        self._listener = asyncio.get_running_loop().create_task(self._listen(self.process))

    def _note_ready(self) -> None:
        self.num_ready += 1
        self.ready_at_s = time.monotonic()
        self.changed.set()

    async def _listen(self, process: WorkerProcess) -> None:
        try:
            while True:
                await process.next_event(timeout_s=1e6)
                self._note_ready()
        except WorkerFailed as error:
            if not self.is_stopping:
                self.lost = error.message
        self.changed.set()

    async def wait_ready(self, count: int, timeout_s: float) -> bool:
        """Until `num_ready` is `count`; False if it takes longer, or the worker has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_ready < count and not self.lost:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return self.num_ready >= count

    def kill_all(self) -> None:
        """kill -9 of supervisor, broker and engine, as when the host dies."""
        self.is_stopping = True
        for part in ("supervisor", "broker", "engine"):
            send(self.pid(part), signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM, and wait for the end (of a killed worker: just wait). The exit code."""
        if self.process is None:
            return 0
        self.is_stopping = True
        code = await self.process.stop()
        await self._stack.aclose()
        if self._listener is not None:
            await self._listener
        self.process = None
        return code


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Site:
    """Redis and workers in a directory of their own. Use `async with`.

    redis_server: the executable (default: the one of `serve`).
    """

    def __init__(
        self, num_workers: int, arguments: tuple[str, ...], redis_server: Path | None = None
    ) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="tb-chaos-")
        self.directory = Path(self._holder.name)
        self.redis = Redis(self.directory, redis_server or find_binary())
        self._num_workers = num_workers
        self._arguments = arguments
        self.workers: list[Worker] = []

    async def __aenter__(self) -> Site:
        self.redis.start()
        for _ in range(self._num_workers):
            self.add_worker()
        starts = [asyncio.create_task(worker.start()) for worker in self.workers]
        await asyncio.wait(starts)
        if any(start.exception() for start in starts):
            await self.close()
        await asyncio.gather(*starts)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop everything and remove the directory."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        for worker in self.workers:
            worker.proxy.close()
        self.redis.kill()
        self._holder.cleanup()

    def add_worker(self, environment: Mapping[str, str] | None = None) -> Worker:
        """One more, not started yet; stopped with the site."""
        directory = self.directory / f"w{len(self.workers)}"
        proxy = TcpProxy(self.redis.socket_path)
        self.workers.append(Worker(directory, proxy, self._arguments, environment or {}))
        return self.workers[-1]

    def keep_logs(self, target: Path) -> None:
        """Copy every log there, for what went wrong."""
        target.mkdir(parents=True, exist_ok=True)
        for path in self.directory.rglob("*.log"):
            name = f"{path.parent.name}-{path.name}"
            (target / name).write_bytes(path.read_bytes())


async def until(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Poll a condition that nothing announces; False if it does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True
