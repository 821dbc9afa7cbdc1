"""A Redis door with stand-ins for text and ledger, for tests against real redis-servers.

The ledger's tokens are a function of the seq alone (letters), so that the text of a job does not
depend on who generated which part of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis

from broker.actor import ActorSystem
from broker.config import BrokerConfig, RedisConfig
from broker.messages import (
    AboutJob,
    Accepted,
    Cancel,
    Capacity,
    Done,
    DoorStatus,
    Drop,
    EngineState,
    Failed,
    Pause,
    Prepare,
    Prepared,
    PrepareFailed,
    Publish,
    Refused,
    Released,
    Submit,
    Tokens,
    Unpause,
    Usage,
)
from broker.ring.records import Sampling
from broker.streams.door import StreamsDoor
from tests.redis_servers import RedisServer
from tokenbus.errors import InvalidField, TokenbusError
from tokenbus.events import crc32_of_ids
from tokenbus.keys import Keys

_queues = itertools.count()


def token_at(seq: int) -> int:
    """Id of the token at a seq: the code of a letter."""
    return 97 + (seq * 7) % 26


def text_of(num_tokens: int, start: int = 1) -> str:
    """Text of the tokens start .. num_tokens."""
    return "".join(chr(token_at(seq)) for seq in range(start, num_tokens + 1))


async def until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> Any:
    """Poll until the condition holds; its value. Fails with `what` (or the condition) otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


class FakeText:
    """One token a character. The prompt `bad` cannot be prepared."""

    def tell(self, message: object) -> bool:
        assert isinstance(message, Prepare)
        request, context = message.request, message.context
        prompt = request.prompt or json.dumps(request.messages or request.input_ids)
        answer: object = PrepareFailed(
            request, InvalidField("prompt: bad", field="prompt"), context
        )
        if prompt != "bad":
            ids = np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32)
            params = request.params
            max_tokens = params.max_tokens or 8
            answer = Prepared(request, ids, Sampling(), (), max_tokens, params.min_tokens, context)
        message.reply_to.tell(answer)
        return True


@dataclass
class Run:
    """A job in the stand-in ledger."""

    submit: Submit
    ids: list[int] = field(default_factory=list)
    is_paused: bool = False


class FakeLedger:
    """Runs jobs by hand (`step`, `finish`) or by itself (`is_automatic`)."""

    def __init__(self, max_jobs: int = 100) -> None:
        self.door: StreamsDoor
        self.max_jobs = max_jobs
        self.is_automatic = False
        self.runs: dict[str, Run] = {}
        self.messages: list[object] = []
        self.submits: list[Submit] = []
        self.refuse_with: TokenbusError | None = None
        self.num_steps = 0
        self.is_hung = False

    def tell(self, message: object) -> bool:
        self.messages.append(message)
        match message:
            case Submit():
                self._on_submit(message)
            case Cancel() if self._has(message):
                self.finish(message.job, message.reason)
            case Drop() if self._has(message):
                self.runs.pop(message.job)
            case Pause() | Unpause() if self._has(message):
                self.runs[message.job].is_paused = isinstance(message, Pause)
        self.say_capacity()
        return True

    def _has(self, message: AboutJob) -> bool:
        run = self.runs.get(message.job)
        return run is not None and message.attempt in (0, run.submit.attempt)

    def say_capacity(self) -> None:
        self.door.tell(Capacity(max(0, self.max_jobs - len(self.runs))))

    def say_state(self, ready: bool = True) -> None:
        self.num_steps += not self.is_hung
        self.door.tell(EngineState(ready, self.num_steps))

    def _on_submit(self, message: Submit) -> None:
        job = message.prepared.request.job
        self.submits.append(message)
        if self.refuse_with is not None:
            message.door.tell(Refused(job, self.refuse_with, message.attempt))
            return
        self.runs[job] = Run(message, list(message.prefix_ids))
        prompt_tokens = len(message.prepared.prompt_ids)
        message.door.tell(Accepted(job, message.attempt, message.seed, prompt_tokens))

    def step(self, job: str, num_tokens: int = 1) -> None:
        """One step of the engine: tokens for one job."""
        run = self.runs[job]
        seq = len(run.ids) + 1
        ids = [token_at(seq + i) for i in range(num_tokens)]
        run.ids.extend(ids)
        text = "".join(map(chr, ids))
        self.door.tell(Publish([Tokens(job, run.submit.attempt, seq, ids, text)]))

    def finish(self, job: str, reason: str = "length") -> None:
        """End a job."""
        run = self.runs.pop(job)
        prompt_tokens = len(run.submit.prepared.prompt_ids)
        usage = Usage(prompt_tokens, len(run.ids), 0, 0.0, 0.0, 0.0)
        crc = crc32_of_ids(run.ids)
        event = Done(job, run.submit.attempt, len(run.ids), reason, "", usage, crc)
        self.door.tell(Publish([event]))
        self.say_capacity()

    def fail(self, job: str, error: TokenbusError, *, dead: bool = False) -> None:
        """End a job by error."""
        run = self.runs.pop(job)
        self.door.tell(Publish([Failed(job, run.submit.attempt, len(run.ids), error, dead)]))
        self.say_capacity()

    def release(self, *jobs: str) -> None:
        """Give jobs back, as at the end of a drain."""
        self.door.tell(Released([(job, self.runs.pop(job).submit.attempt) for job in jobs]))

    def run_all(self) -> None:
        """One step for every job that is not paused; jobs at their length end."""
        for job, run in list(self.runs.items()):
            if not run.is_paused:
                self.step(job)
                if len(run.ids) >= run.submit.prepared.max_tokens:
                    self.finish(job)


class Monitor:
    """Keeps the door's reports."""

    def __init__(self) -> None:
        self.reports: list[object] = []

    def tell(self, message: object) -> bool:
        self.reports.append(message)
        return True

    @property
    def is_ready(self) -> bool:
        """By the last report."""
        states = [report for report in self.reports if isinstance(report, DoorStatus)]
        return bool(states) and states[-1].ready


class Worker:
    """One door on the running loop."""

    def __init__(
        self, server_url: str, queue: str, name: str, *, max_jobs: int = 100, **redis_settings: Any
    ) -> None:
        settings = {
            "lease_ms": 1_000,
            "renew_ms": 250,
            "block_ms": 200,
            "socket_timeout_ms": 1_000,
            "coalesce_ms": 5,
            **redis_settings,
        }
        config = BrokerConfig(
            worker=name,
            queue=queue,
            model_path="",
            model_name="fake",
            link_path="",
            redis=RedisConfig(url=server_url, **settings),
        )
        self.name = name
        self.ledger = FakeLedger(max_jobs)
        self.monitor = Monitor()
        self.system = ActorSystem(asyncio.get_running_loop())
        self.door = StreamsDoor(self.system, config, FakeText(), self.ledger, self.monitor)
        self.ledger.door = self.door
        self._engine: asyncio.Task[None] | None = None

    async def start(self) -> Worker:
        """Start the door and wait until it is ready."""
        self.begin()
        await until(lambda: self.door.is_ready, what="the door is ready")
        return self

    def begin(self) -> None:
        """Start the door without waiting."""
        self.system.start()
        self.ledger.say_state()
        self.ledger.say_capacity()
        self._engine = asyncio.get_running_loop().create_task(self._run_engine())

    async def _run_engine(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.ledger.say_state()
            if self.ledger.is_automatic and not self.ledger.is_hung:
                self.ledger.run_all()

    async def stop(self) -> None:
        """A proper end."""
        if self._engine is not None:
            self._engine.cancel()
        await self.system.stop()
        assert not self.system.crashed.done(), self.system.crashed.result()

    async def kill(self) -> None:
        """As kill -9: connections break, nothing more is said."""
        if self._engine is not None:
            self._engine.cancel()
        self.door._state.link.close()
        self.door.is_closed = True
        for task in list(self.door._tasks):
            task.cancel()
        await asyncio.sleep(0)


class Bus:
    """A queue of its own on a server, seen as a client does."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.queue = f"q{next(_queues)}"
        self.keys = Keys(self.queue)
        self.client: redis.Redis = server.client()
        self.workers: list[Worker] = []

    async def worker(self, name: str = "a", **settings: Any) -> Worker:
        """A started worker; stopped with the bus."""
        worker = Worker(self.server.url, self.queue, name, **settings)
        self.workers.append(worker)
        return await worker.start()

    def submit(self, stream: str = "", **fields: Any) -> str:
        """XADD; the job's id."""
        entry = self.client.xadd(stream or self.keys.jobs(), {"prompt": "hello", **fields})
        return str(fields.get("job", entry))

    def out(self, job: str) -> list[tuple[str, dict[str, str]]]:
        """Entries of a reply stream."""
        return self.client.xrange(self.keys.out(job))

    def events(self, job: str) -> list[str]:
        """Event words of a reply stream."""
        return [fields["event"] for _, fields in self.out(job)]

    def terminal(self, job: str) -> dict[str, str] | None:
        """The last entry if it ends the job."""
        entries = self.out(job)
        last = entries[-1][1] if entries else {}
        return last if last.get("event") in ("done", "error") else None

    def text(self, job: str) -> str:
        """All text of a job."""
        return "".join(fields.get("text", "") for _, fields in self.out(job))

    def state(self, job: str) -> dict[str, str]:
        """The job's hash."""
        return self.client.hgetall(self.keys.job(job))

    def num_pending(self) -> int:
        """Entries delivered and not acknowledged, in all three streams."""
        streams = (self.keys.jobs(), self.keys.jobs("high"), self.keys.jobs("low"))
        return sum(self.client.xpending(stream, "workers")["pending"] for stream in streams)

    def num_entries(self) -> int:
        """Entries in all three streams."""
        streams = (self.keys.jobs(), self.keys.jobs("high"), self.keys.jobs("low"))
        return sum(self.client.xlen(stream) for stream in streams)

    def audit(self, job: str) -> None:
        """One terminal, seqs without holes or repeats, right CRC and text, nothing left pending."""
        entries = self.out(job)
        words = [fields["event"] for _, fields in entries]
        assert sum(word in ("done", "error") for word in words) == 1, words
        assert words[-1] in ("done", "error"), words
        ids: list[int] = []
        for entry, fields in entries:
            if fields["event"] == "tokens":
                assert int(fields["seq"]) == len(ids) + 1, entries
                ids.extend(json.loads(fields["ids"]))
                assert entry.split("-")[1] == str(len(ids)), entries
        assert entries[-1][0].split("-")[1] == str(len(ids) + 1), entries
        assert ids == [token_at(seq + 1) for seq in range(len(ids))]
        assert self.text(job) == text_of(len(ids))
        if words[-1] == "done":
            assert int(entries[-1][1]["crc"]) == crc32_of_ids(ids)

    def audit_queue(self) -> None:
        """Nothing queued, nothing pending, every key of a job has a TTL."""
        assert (self.num_entries(), self.num_pending()) == (0, 0)
        for key in self.client.scan_iter(f"{self.keys.prefix}*"):
            if any(part in key for part in (":out:", ":job:", ":cancel:", ":idem:")):
                assert self.client.ttl(key) > 0, key


@asynccontextmanager
async def open_bus(server: RedisServer) -> AsyncIterator[Bus]:
    """A bus whose workers are stopped at the end; a crash of one fails the test."""
    bus = Bus(server)
    try:
        yield bus
    finally:
        for worker in bus.workers:
            if not worker.door.is_closed:
                await worker.stop()
        bus.client.close()
