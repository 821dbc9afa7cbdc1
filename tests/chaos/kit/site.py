"""Whole workers on one Redis for chaos tests, what they are asked, and the audit at the end."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from engine.fake_runner import expected_tokens
from ops.bench.chaos_audit import EventAuditor, RedisAuditor
from ops.bench.chaos_load import PATIENT
from ops.bench.chaos_site import QUEUE, Site, Worker, until
from tests.chaos.kit.processes import descendants, is_alive
from tests.integration.zmq_raw import RawClient
from tokenbus import AsyncClient
from tokenbus.events import Done, Failed, Started, Tokens
from tokenbus.keys import Keys
from tokenbus.protocol import MessageType

VOCAB = 512
LEASE_S = 2.0
FAST = (
    *("--model", "fake", "--drain-s", "1"),
    *("--set", f"streams.lease_ms={LEASE_S * 1000:.0f}", "--set", "streams.renew_ms=700"),
)


def letters(ids: Iterable[int]) -> str:
    """The fake model's text of these ids."""
    return "".join(chr(97 + i % 26) for i in ids)


@dataclass(frozen=True)
class Ask:
    """A job with its right answer."""

    prompt: str
    max_tokens: int

    @property
    def ids(self) -> list[int]:
        """Of an undisturbed run."""
        return expected_tokens(list(self.prompt.encode()), self.max_tokens, VOCAB)


class ChaosSite:
    """A running site, the jobs sent to it, and the checks."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keys = Keys(QUEUE)
        self.client: redis.Redis = site.redis.client()
        self.auditor = RedisAuditor(self.client, QUEUE)
        self.asked: dict[str, Ask] = {}  # jobs in Redis that must end well
        self._clients: list[AsyncClient] = []

    @property
    def workers(self) -> list[Worker]:
        """In the order of their start."""
        return self.site.workers

    def submit(self, count: int, max_tokens: int, prompt: str = "job", **fields: Any) -> list[str]:
        """XADD so many jobs, whose prompts differ."""
        jobs = []
        for i in range(count):
            ask = Ask(f"{prompt} {len(self.asked)} {i}", max_tokens)
            entry = {"prompt": ask.prompt, "max_tokens": max_tokens, **fields}
            jobs.append(str(self.client.xadd(self.keys.jobs(), entry)))
            self.asked[jobs[-1]] = ask
        return jobs

    def out(self, job: str) -> list[dict[str, str]]:
        """Entries of a job's stream."""
        return [fields for _, fields in self.client.xrange(self.keys.out(job))]

    def has_tokens(self, job: str) -> bool:
        """Whether something of the answer is out."""
        return any(fields["event"] == "tokens" for fields in self.out(job))

    def last(self, job: str) -> dict[str, str]:
        """The last entry; empty before any."""
        entries = self.client.xrevrange(self.keys.out(job), count=1)
        return entries[0][1] if entries else {}

    def is_over(self, job: str) -> bool:
        """Whether the terminal entry is there."""
        return self.last(job).get("event") in ("done", "error")

    def attempts(self, job: str) -> int:
        """How often it was started."""
        return sum(fields["event"] == "started" for fields in self.out(job))

    def owners(self, jobs: Iterable[str]) -> set[str]:
        """Workers whose leases these jobs are under."""
        return {str(self.client.hget(self.keys.job(job), "worker")) for job in jobs}

    async def running(self, jobs: Iterable[str], timeout_s: float = 30.0) -> None:
        """Until each has tokens."""
        await wait_for(lambda: all(map(self.has_tokens, jobs)), timeout_s, "all jobs have tokens")

    async def over(self, jobs: Iterable[str] | None = None, timeout_s: float = 60.0) -> None:
        """Until each (all) has ended."""
        names = list(self.asked if jobs is None else jobs)
        await wait_for(lambda: all(map(self.is_over, names)), timeout_s, "all jobs are over")

    async def join(self) -> Worker:
        """One more worker; what was submitted before is in the hands of the others."""
        worker = self.site.add_worker()
        await worker.start()
        return worker

    def zmq(self, worker: int = 0) -> AsyncClient:
        """A client of a worker; closed with the site."""
        client = AsyncClient(zmq=self.workers[worker].endpoint, timeouts=PATIENT)
        self._clients.append(client)
        return client

    def is_ready(self, worker: int = 0) -> bool:
        """By its line in Redis."""
        line = self.client.hget(self.keys.workers, self.workers[worker].name)
        return bool(line and json.loads(str(line))["ready"])

    async def audit(self) -> None:
        """Every job as an undisturbed run has it, the queue empty, no KV block held."""
        await self.over()
        await wait_for(lambda: not self.auditor.problems(self.asked), 10.0, self._problems)
        for job, ask in self.asked.items():
            assert self.auditor.ids_of(job) == ask.ids, job
            assert self.auditor.text_of(job) == letters(ask.ids), job
        for worker in self.workers:
            if worker.process is not None:
                await no_blocks_used(worker.endpoint)
                await no_old_rings(worker)

    def _problems(self) -> str:
        return "\n".join(self.auditor.problems(self.asked)[:10])

    async def close(self) -> None:
        """Stop the clients."""
        for client in self._clients:
            await client.close()
        self.client.close()


async def wait_for(
    condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]
) -> None:
    """Poll, and fail in words."""
    if not await until(condition, timeout_s):
        raise AssertionError(
            f"not within {timeout_s} s: {what if isinstance(what, str) else what()}"
        )


async def no_blocks_used(endpoint: str) -> None:
    """Until the worker says that its KV cache is free."""
    async with RawClient(endpoint) as client:
        await client.hello()
        for _ in range(100):
            await client.send(MessageType.STATS)
            body = (await client.receive(MessageType.STATS)).body
            if body["total_blocks"] and not body["used_blocks"] and not body["running"]:
                return
            await asyncio.sleep(0.1)
    raise AssertionError(f"KV blocks are still held: {body}")


async def no_old_rings(worker: Worker) -> None:
    """Until broker and engine hold the two rings that join them, and none of an engine that died or
    of a broker that did.
    """

    def are_shared() -> bool:
        maps = [rings_of(worker.pid(part)) for part in ("broker", "engine")]
        return maps[0] == maps[1] and len(maps[0]) == 2

    await wait_for(are_shared, 10.0, "broker and engine hold their two rings and no others")


def rings_of(pid: int) -> set[str]:
    """Inodes of the ring memory that a process has mapped or holds open."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        files = list(Path(f"/proc/{pid}/fd").iterdir())
        mapped = {line.split()[4] for line in lines if "memfd:tokenbus" in line}
        held = {str(f.stat().st_ino) for f in files if "memfd:tokenbus" in os.readlink(f)}
    except (FileNotFoundError, ProcessLookupError):
        return set()  # it is just being replaced
    return mapped | held


@asynccontextmanager
async def open_site(
    num_workers: int = 1, arguments: Sequence[str] = (), *, start: Sequence[str] = FAST
) -> AsyncIterator[ChaosSite]:
    """A site whose processes, files and shared memory are gone at the end, checked.

    arguments: for `serve`, such as `--set`, `fake.step_ms=5`. CHAOS_REDIS_SERVER in the environment
    names another redis-server than that of `serve`.
    """
    before = set(os.listdir("/dev/shm"))
    others = set(descendants(os.getpid()))  # of a site that several tests share
    server = os.environ.get("CHAOS_REDIS_SERVER")
    async with Site(num_workers, (*start, *arguments), Path(server) if server else None) as site:
        chaos = ChaosSite(site)
        try:
            yield chaos
            for worker in site.workers:
                await worker.stop()
            left = set(descendants(os.getpid())) - others
            strays = [pid for pid in left if _is_worker(pid)]
            assert not strays, f"processes left behind: {strays}"
        finally:
            await chaos.close()
    assert not {name for name in os.listdir("/dev/shm") if "tokenbus" in name} - before


def _is_worker(pid: int) -> bool:
    """A broker or an engine, alive."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return False
    is_ours = b"-m broker" in command or b"-m engine" in command
    return is_ours and is_alive(pid)


class Listener:
    """Follows jobs over ZeroMQ as a user does, and audits what it was handed."""

    def __init__(self) -> None:
        self.auditor = EventAuditor()
        self.asked: dict[str, Ask] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.num_tokens: dict[str, int] = {}

    def generate(self, client: AsyncClient, ask: Ask, **options: Any) -> str:
        """Start a job and follow it in the background; its name."""
        job = uuid.uuid4().hex
        self.asked[job] = ask
        self.num_tokens[job] = 0
        options = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "job": job, **options}
        self.tasks.append(asyncio.create_task(self._follow(client, options)))
        return job

    async def _follow(self, client: AsyncClient, options: dict[str, Any]) -> None:
        stream = client.generate(**options)
        async for tokens in stream:
            if tokens.ids:
                self.see(tokens)
            else:
                raise AssertionError("the fake model holds no text back")
        assert stream.done is not None
        self.see(stream.done)

    def see(self, event: Started | Tokens | Done | Failed) -> None:
        """Note one event."""
        self.auditor.see_tokenbus(event)
        if isinstance(event, Tokens):
            self.num_tokens[event.job] += len(event.ids)

    async def running(self, at_least: int = 1) -> None:
        """Until each job has so many tokens."""

        def are_running() -> bool:
            for task in self.tasks:
                if task.done():
                    task.result()
            return all(count >= at_least for count in self.num_tokens.values())

        await wait_for(are_running, 30.0, "all ZeroMQ jobs have tokens")

    async def audit(self, timeout_s: float = 60.0) -> None:
        """Wait for the ends, then check every job."""
        await asyncio.wait_for(asyncio.gather(*self.tasks), timeout_s)
        self.auditor.check(self.asked)
        for job, ask in self.asked.items():
            assert self.auditor.ids_of(job) == ask.ids, job
            assert self.auditor.text_of(job) == letters(ask.ids), job
