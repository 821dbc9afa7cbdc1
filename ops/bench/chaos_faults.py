"""The faults: what is done to whom, and how long until everything is as before."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ops.bench.chaos_site import Site, Worker, send

RECOVERY_S = 120.0


@dataclass(slots=True)
class Fault:
    """One fault. workers: names of the workers' lives that it hit (all: every worker)."""

    kind: str
    at_s: float
    workers: tuple[str, ...]
    pauses_s: list[float] = field(default_factory=list)  # of each job that it interrupted
    recovered_s: float = 0.0  # until every process was ready again
    problem: str = ""
    undisturbed_s: list[float] = field(default_factory=list)  # those over before the next fault


class Faults:
    """Inflicts faults on a site, one at a time.

    lease_s: how long a stopped process is stopped depends on it. on_hit: called at the moment of
    the fault, before anything can recover.
    """

    def __init__(
        self, site: Site, rng: random.Random, lease_s: float, on_hit: Callable[[Fault], None]
    ) -> None:
        self._site = site
        self._rng = rng
        self._lease_s = lease_s
        self._on_hit = on_hit

    async def inflict(self, kind: str) -> Fault:
        """Do one of `KINDS`, and wait until every worker is ready again."""
        fault = await _KINDS[kind](self, kind)
        fault.recovered_s = time.monotonic() - fault.at_s
        return fault

    def _hit(self, kind: str, *workers: Worker) -> Fault:
        fault = Fault(kind, time.monotonic(), tuple(worker.name for worker in workers))
        self._on_hit(fault)
        return fault

    def _pick(self) -> Worker:
        return self._rng.choice(self._site.workers)

    async def _kill_part(self, kind: str) -> Fault:
        worker = self._pick()
        count = worker.num_ready
        fault = self._hit(kind, worker)
        send(worker.pid(kind.removesuffix("_kill")), signal.SIGKILL)
        if not await worker.wait_ready(count + 1, RECOVERY_S):
            fault.problem = worker.lost or f"not ready {RECOVERY_S:.0f} s later"
        return fault

    async def _kill_worker(self, kind: str) -> Fault:
        worker = self._pick()
        fault = self._hit(kind, worker)
        worker.kill_all()
        await worker.stop()
        await worker.start()
        return fault

    async def _term_worker(self, kind: str) -> Fault:
        worker = self._pick()
        fault = self._hit(kind, worker)
        code = await worker.stop()
        if code:
            fault.problem = f"SIGTERM gave exit code {code}"
        await worker.start()
        return fault

    async def _stop_part(self, kind: str) -> Fault:
        """SIGSTOP for longer than a lease, then SIGCONT: the zombie must find itself fenced."""
        worker = self._pick()
        fault = self._hit(kind, worker)
        pid = worker.pid(kind.removesuffix("_stop"))
        send(pid, signal.SIGSTOP)
        await asyncio.sleep(self._lease_s * self._rng.uniform(1.2, 2.0))
        send(pid, signal.SIGCONT)
        return fault

    async def _kill_redis(self, kind: str) -> Fault:
        fault = self._hit(kind, *self._site.workers)
        await asyncio.to_thread(self._site.redis.kill)
        await asyncio.sleep(self._rng.uniform(0.0, 2.0))
        await asyncio.to_thread(self._site.redis.start)
        return fault

    async def _stop_redis(self, kind: str) -> Fault:
        fault = self._hit(kind, *self._site.workers)
        self._site.redis.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.5, 5.0))
        self._site.redis.send(signal.SIGCONT)
        return fault

    async def _cut(self, kind: str) -> Fault:
        worker = self._pick()
        fault = self._hit(kind, worker)
        worker.proxy.cut()
        return fault

    async def _silence(self, kind: str) -> Fault:
        """A partition of one worker from Redis, longer than a lease."""
        worker = self._pick()
        fault = self._hit(kind, worker)
        direction = self._rng.choice((worker.proxy.up, worker.proxy.down))
        worker.proxy.swallow(direction)
        await asyncio.sleep(self._lease_s * self._rng.uniform(1.2, 2.0))
        worker.proxy.heal()
        return fault


_KINDS: dict[str, Callable[[Faults, str], Awaitable[Fault]]] = {
    "engine_kill": Faults._kill_part,
    "broker_kill": Faults._kill_part,
    "worker_kill": Faults._kill_worker,
    "worker_term": Faults._term_worker,
    "engine_stop": Faults._stop_part,
    "broker_stop": Faults._stop_part,
    "redis_kill": Faults._kill_redis,
    "redis_stop": Faults._stop_redis,
    "redis_cut": Faults._cut,
    "redis_silence": Faults._silence,
}
KINDS = tuple(_KINDS)
