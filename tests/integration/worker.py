"""A broker and an engine with the fake model, as two processes, for tests of the ZeroMQ door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from broker.config import BrokerConfig, QueueConfig, RedisConfig, ZmqConfig
from engine.config import EngineConfig, FakeModel

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


@dataclass
class Worker:
    """Both processes. `status`: every line that the broker reported."""

    directory: Path
    config: BrokerConfig
    fake: FakeModel
    max_num_seqs: int = 16
    broker: asyncio.subprocess.Process | None = None
    engine: asyncio.subprocess.Process | None = None
    status: list[dict[str, Any]] = field(default_factory=list)
    endpoint: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: asyncio.Task[None] | None = None

    async def start_broker(self) -> None:
        """Start it and wait until its doors are open."""
        reading, writing = os.pipe()
        path = self.directory / "broker.json"
        path.write_text(self.config.to_json())
        log = (self.directory / "broker.log").open("ab")
        self.broker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "broker", "--config", str(path), "--status-fd", str(writing),
            cwd=ROOT, env=environment(), pass_fds=(writing,), stderr=log,
        )  # fmt: skip
        os.close(writing)
        log.close()
        self._reader = asyncio.get_running_loop().create_task(self._read_status(reading))
        self.endpoint = (await self.wait_for("listening"))["zmq"]

    async def start_engine(self) -> None:
        """Start it; `wait_for("ready")` tells when it is there."""
        path = self.directory / "engine.json"
        config = EngineConfig(model_name="fake", fake=self.fake, max_num_seqs=self.max_num_seqs)
        path.write_text(config.to_json())
        log = (self.directory / "engine.log").open("ab")
        self.engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "--config", str(path), "--link", self.config.link_path,
            cwd=ROOT, env=environment(), stderr=log,
        )  # fmt: skip
        log.close()

    async def kill_engine(self) -> None:
        """kill -9, and wait until it is dead."""
        assert self.engine is not None
        with contextlib.suppress(ProcessLookupError):
            self.engine.kill()
        await self.engine.wait()

    async def kill_broker(self) -> None:
        """kill -9, and wait until it is dead."""
        assert self.broker is not None
        self.broker.kill()
        await self.broker.wait()
        if self._reader is not None:
            await self._reader
        self.status.clear()

    async def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """The count-th status line of this kind."""
        async with asyncio.timeout(START_S):
            while True:
                lines = [line for line in self.status if line["event"] == event]
                if len(lines) >= count:
                    return lines[count - 1]
                if self._reader is not None and self._reader.done():
                    raise RuntimeError((self.directory / "broker.log").read_text()[-2000:])
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> int:
        """Drain the broker; returns its exit code."""
        assert self.broker is not None
        if self.broker.returncode is None:
            self.broker.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(self.broker.wait(), START_S)
        if self.engine is not None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                await asyncio.wait_for(self.engine.wait(), 5)
            if self.engine.returncode is None:
                await self.kill_engine()
        if self._reader is not None:
            await self._reader
        return code

    async def _read_status(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
        )
        while line := await reader.readline():
            self.status.append(json.loads(line))
            self._changed.set()
        transport.close()
        self._changed.set()


def environment() -> dict[str, str]:
    """For the child processes: imports from the root, quiet logs."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python'}"}


def make_worker(
    directory: Path,
    *,
    fake: FakeModel | None = None,
    zmq: ZmqConfig | None = None,
    limits: QueueConfig | None = None,
    drain_ms: int = 5_000,
    engine_hang_ms: int = 60_000,
    max_num_seqs: int = 16,
    redis: RedisConfig | None = None,
    name: str = "test-worker",
) -> Worker:
    """A worker that is not started yet, on a free port of its own."""
    model = fake or FakeModel(vocab_size=512)
    config = BrokerConfig(
        worker=name,
        queue="default",
        model_path="",
        model_name="fake",
        link_path=str(directory / "link" / "engine.sock"),
        ring_bytes=1 << 20,
        drain_ms=drain_ms,
        engine_hang_ms=engine_hang_ms,
        zmq=replace(zmq or ZmqConfig(""), endpoint=f"ipc://{directory}/zmq.sock"),
        redis=redis,
        limits=limits or QueueConfig(),
        fake_vocab_size=model.vocab_size,
    )
    return Worker(directory, config, model, max_num_seqs)


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Worker]:
    """Broker and engine up and ready; stopped at the end, whatever happened."""
    await worker.start_broker()
    try:
        await worker.start_engine()
        await worker.wait_for("ready")
        yield worker
    finally:
        await worker.stop()
