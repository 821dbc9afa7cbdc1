"""A broker process for the bus benchmark, with the real engine and its fake model, or with an
engine end that the benchmark plays itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broker.config import BrokerConfig, QueueConfig, RedisConfig, ZmqConfig
from broker.ring.link import connect_engine
from broker.ring.records import Kind, decode_submit, encode_json
from engine.config import EngineConfig, FakeModel
from engine.mailbox import LinkMailbox, StopSignal

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 512
START_S = 30.0


class BusWorker:
    """Broker (and engine, with `start_engine`) as child processes in a directory of their own.
    redis_url: opens the Redis door too.
    """

    def __init__(
        self,
        max_queued: int = 20_000,
        redis_url: str = "",
        name: str = "bench",
        stamps: Path | None = None,
    ) -> None:
        self._name = name
        self._stamps = stamps
        self._redis = RedisConfig(redis_url) if redis_url else None
        self._directory = tempfile.TemporaryDirectory(prefix="tokenbus-bench-")
        self.path = Path(self._directory.name)
        self.link_path = str(self.path / "link" / "engine.sock")
        self._max_queued = max_queued
        self._broker: subprocess.Popen[bytes] | None = None
        self._engine: subprocess.Popen[bytes] | None = None
        self._status = -1
        self.endpoint = ""

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        config = BrokerConfig(
            worker=self._name,
            queue="bench",
            model_path="",
            model_name="fake",
            link_path=self.link_path,
            drain_ms=0,
            zmq=ZmqConfig(f"ipc://{self.path}/zmq.sock"),
            redis=self._redis,
            limits=QueueConfig(max_queued=self._max_queued),
            fake_vocab_size=VOCAB_SIZE,
        )
        module = "broker" if self._stamps is None else "ops.bench.bus_stamps"
        self._broker = self._spawn(
            module, config.to_json(), "--status-fd", str(writing), fds=(writing,)
        )
        os.close(writing)
        self._status = reading
        self.endpoint = str(self.wait_for("listening")["zmq"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in (self._engine, self._broker):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        os.close(self._status)
        self._directory.cleanup()

    def start_engine(self, max_num_seqs: int, step_ms: float = 0.0) -> None:
        """Start the engine with the fake model, and wait until it is ready."""
        fake = FakeModel(
            vocab_size=VOCAB_SIZE, step_ms=step_ms, num_blocks=64 * max_num_seqs, max_model_len=4096
        )
        config = EngineConfig(
            model_name="fake",
            fake=fake,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(8_192, 4 * max_num_seqs),  # prompts get in beside all rows
        )
        self._engine = self._spawn("engine", config.to_json(), "--link", self.link_path)
        self.wait_for("ready")

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next status line of this kind; lines of other kinds are passed over."""
        buffer = b""
        while True:
            data = os.read(self._status, 1)
            if not data:
                raise RuntimeError(f"the broker ended before it was {event}: see {self.path}")
            buffer += data
            if data == b"\n":
                line: dict[str, Any] = json.loads(buffer)
                if line["event"] == event:
                    return line
                buffer = b""

    @property
    def broker_pid(self) -> int:
        """Process id of the broker."""
        assert self._broker is not None, "the worker is not started"
        return self._broker.pid

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        assert self._engine is not None, "the engine is not started"
        return self._engine.pid

    def _spawn(
        self, module: str, config: str, *args: str, fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        path = self.path / f"{module}.json"
        path.write_text(config)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python'}"}
        if self._stamps is not None:
            env["TOKENBUS_BENCH_STAMPS"] = str(self._stamps)
        argv = [sys.executable, "-m", module, "--config", str(path), "--log-level", "warning"]
        return subprocess.Popen([*argv, *args], cwd=ROOT, env=env, pass_fds=fds)


class BenchEngine:
    """An engine's end of the link, which waits as the engine does."""

    def __init__(self, link_path: str) -> None:
        self._stop = StopSignal()
        self._link = connect_engine(link_path, 5.0)
        self._mailbox = LinkMailbox(self._link, self._stop)
        self.write(Kind.READY, encode_json(_ready_facts()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._mailbox.close()
        self._stop.close()

    def write(self, kind: Kind, record: bytes) -> None:
        """One record for the broker."""
        if not self._mailbox.try_write(kind, record):
            raise RuntimeError("the ring is full")

    def await_submit(self) -> tuple[int, int]:
        """The rid of the next SUBMIT, and when the engine was awake for it (perf_counter_ns)."""
        while self._mailbox.wait(10.0):
            awake_ns = time.perf_counter_ns()
            for kind, payload in self._mailbox.read(16):
                if kind == Kind.SUBMIT:
                    return decode_submit(payload).rid, awake_ns
        raise RuntimeError("no SUBMIT reached the engine within 10 s")


def _ready_facts() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE, "max_model_len": 4096, "num_blocks": 4096, "block_size": 16,
        "max_num_seqs": 16, "eos_token_ids": [],
    }  # fmt: skip


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
