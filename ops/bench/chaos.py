"""`tokenbus bench chaos`: random faults under steady load over both doors, and a count of damage.

Exit code 1 if any job was lost, repeated or otherwise wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench.bus_worker import rss_bytes
from ops.bench.chaos_audit import RedisAuditor
from ops.bench.chaos_faults import KINDS, Fault, Faults
from ops.bench.chaos_load import PATIENT, FakeQuestions, Load, RealQuestions
from ops.bench.chaos_report import count_logs, count_streams, drift, takeovers
from ops.bench.chaos_site import QUEUE, Site, Worker, until
from ops.settings import FAKE_MODEL
from tokenbus import AsyncClient
from tokenbus.errors import InvalidField

DOORS = ("redis", "zmq", "durable")
SAMPLE_S = 2.0
END_S = 180.0  # for the jobs that are open at the end


class Chaos:
    """One run: site, load, faults, samples of memory."""

    def __init__(self, args: argparse.Namespace, site: Site) -> None:
        self._args = args
        self._site = site
        self._rng = random.Random(args.seed)
        self._faults = Faults(site, random.Random(args.seed + 1), args.lease_s, self._on_hit)
        self._hits: list[tuple[Fault, list[Any]]] = []
        self._samples: list[tuple[float, dict[str, int]]] = []
        self._load: Load
        self._began_s = 0.0

    async def run(self) -> dict[str, Any]:
        """Load and faults for the time asked; the result in numbers."""
        self._load = await self._make_load()
        self._began_s = began_s = time.monotonic()
        self._load.start()
        sampler = asyncio.create_task(self._sample_memory())
        await asyncio.sleep(1.0)
        await self._inflict_all(began_s)
        took_s = time.monotonic() - began_s
        await self._load.stop(END_S)
        sampler.cancel()
        return await self._result(took_s)

    async def _make_load(self) -> Load:
        redis_url = self._site.redis.url
        is_fake = self._args.model == FAKE_MODEL
        if is_fake:
            questions: Any = FakeQuestions(20, self._args.tokens)
        else:
            questions = RealQuestions(self._args.tokens)
            async with AsyncClient(redis=redis_url, queue=QUEUE, timeouts=PATIENT) as client:
                await questions.ask_undisturbed(client)
        load = Load(questions, self._args.jobs, self._rng)
        load.worker_of = lambda door: self._site.workers[int(door.partition(":")[2])].name
        if "redis" in self._args.doors:
            load.add_door("redis", AsyncClient(redis=redis_url, queue=QUEUE, timeouts=PATIENT))
        for i, worker in enumerate(self._site.workers):
            for door in ("zmq", "durable"):
                if door in self._args.doors:
                    client = AsyncClient(zmq=worker.endpoint, timeouts=PATIENT)
                    load.add_door(f"{door}:{i}", client)
        return load

    def _on_hit(self, fault: Fault) -> None:
        hit = [log for log in self._load.open_logs() if log.worker in fault.workers]
        if "redis" in fault.kind:
            hit = [log for log in hit if log.door == "redis"]
        self._hits.append((fault, hit))

    async def _inflict_all(self, began_s: float) -> None:
        args = self._args
        kinds = args.faults or KINDS
        end_s = began_s + args.minutes * 60
        count = 0
        while time.monotonic() < end_s and (not args.count or count < args.count):
            at_s = time.monotonic()
            kind = self._rng.choice(kinds)
            fault = await self._faults.inflict(kind)
            count += 1
            if not args.json:
                text = f"{at_s - began_s:7.1f} s  {kind:14} ready after {fault.recovered_s:6.2f} s"
                print(f"{text}  {len(self._load.logs)} jobs {fault.problem}", flush=True)
            if fault.problem:
                raise SystemExit(f"{kind}: {fault.problem}")
            pause_s = args.every_s * self._rng.uniform(0.5, 1.5) - (time.monotonic() - at_s)
            await asyncio.sleep(max(pause_s, self._rng.uniform(0.1, 1.0)))

    async def _sample_memory(self) -> None:
        while True:
            sizes: dict[str, list[int]] = {}
            for worker in self._site.workers:
                for part in ("supervisor", "broker", "engine"):
                    size = _rss(worker, part)
                    if size:
                        sizes.setdefault(part, []).append(size)
            means = {part: sum(values) // len(values) for part, values in sizes.items()}
            self._samples.append((time.monotonic(), means))
            await asyncio.sleep(SAMPLE_S)

    def _note_pauses(self) -> list[tuple[float, str]]:
        """Into the faults; returns all of them with words about each."""
        worst: list[tuple[float, str]] = []
        ends_s = [fault.at_s for fault, _ in self._hits[1:]] + [math.inf]
        for (fault, logs), end_s in zip(self._hits, ends_s, strict=True):
            for log in logs:
                pause_s = log.silence_after_s(fault.at_s)
                if pause_s is not None:
                    fault.pauses_s.append(pause_s)
                    if fault.at_s + pause_s <= end_s:
                        fault.undisturbed_s.append(pause_s)
                    at_s = fault.at_s - self._began_s
                    words = f"{pause_s:.1f} s after {fault.kind} at {at_s:.1f} s: {log.job}"
                    worst.append((pause_s, f"{words} ({log.door})"))
        return worst

    async def _result(self, took_s: float) -> dict[str, Any]:
        worst = self._note_pauses()
        with self._site.redis.client() as client:
            auditor = RedisAuditor(client, QUEUE)
            await until(lambda: not auditor.problems(()), 10.0)
            streams = count_streams(auditor, self._load.logs)
        seen = count_logs(self._load.logs)
        lines = seen.lines + streams.lines
        faults = [fault for fault, _ in self._hits]
        return {
            "bench": "chaos",
            "model": self._args.model,
            "workers": len(self._site.workers),
            "lease_s": self._args.lease_s,
            "redis": self._site.redis.version(),
            "seed": self._args.seed,
            "minutes": round(took_s / 60, 2),
            "faults": len(faults),
            "clients": seen.to_json(),
            "streams": streams.to_json(),
            "takeover": takeovers(faults),
            "longest_pauses": [words for _, words in sorted(worst, reverse=True)[:3]],
            "memory": drift(self._samples),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "problems": lines[:20],
        }


def _rss(worker: Worker, part: str) -> int:
    if worker.process is None:
        return 0
    try:
        return rss_bytes(worker.pid(part))
    except (FileNotFoundError, ProcessLookupError, KeyError, IndexError):
        return 0


def serve_arguments(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags of `serve` for this run."""
    settings = {
        "streams.lease_ms": round(args.lease_s * 1000),
        "streams.renew_ms": max(round(args.lease_s * 1000 / 3), 100),
    }
    if args.model == FAKE_MODEL:
        settings["fake.step_ms"] = args.step_ms
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ("--model", args.model, "--drain-s", str(args.drain_s), *flags)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises InvalidField for a fault or a door that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default=FAKE_MODEL, help="fake, or a model to load")
    parser.add_argument("--every-s", type=float, default=20.0, help="mean time between faults")
    parser.add_argument("--count", type=int, default=0, help="stop after so many faults")
    parser.add_argument("--faults", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument(
        "--doors", nargs="*", default=["redis", "zmq"], help=f"of {', '.join(DOORS)}"
    )
    parser.add_argument("--jobs", type=int, default=15, help="open at a time")
    parser.add_argument("--tokens", type=int, default=300, help="longest job")
    parser.add_argument("--step-ms", type=int, default=10, help="of the fake model")
    parser.add_argument("--lease-s", type=float, default=15.0)
    parser.add_argument("--drain-s", type=float, default=0.5)
    parser.add_argument("--redis-server", type=Path, help="executable (default: that of serve)")
    parser.add_argument("--logs", type=Path, help="keep the logs of the processes here")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args(argv)
    for field, known in (("faults", KINDS), ("doors", DOORS)):
        unknown = [name for name in getattr(args, field) or () if name not in known]
        if unknown:
            message = f"{field}: unknown {', '.join(unknown)}; there are {', '.join(known)}"
            raise InvalidField(message, field=field)
    return args


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run from start to end."""
    async with Site(args.workers, serve_arguments(args), args.redis_server) as site:
        try:
            return await Chaos(args, site).run()
        finally:
            if args.logs:
                site.keep_logs(args.logs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, and exit with 1 if anything was wrong; with 2 for a bad command line."""
    try:
        args = parse(argv)
    except InvalidField as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None
    result = asyncio.run(measure(args))
    if not args.json:
        for kind, numbers in result["takeover"].items():
            print(kind, "  ".join(f"{name} {value}" for name, value in numbers.items()))
        for name in ("clients", "streams", "memory"):
            print(name, json.dumps(result[name]))
    print(json.dumps(result), flush=True)
    if result["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
