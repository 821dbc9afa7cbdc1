"""`tokenbus bench bus`: what the bus costs without a model. One JSON line last.

Latency is measured with the benchmark at both ends of an idle broker, on one clock; throughput with
the real engine process, whose fake model computes nothing. The Redis parts share one redis-server
with the no-op jobs of Celery and BullMQ, which are measured where --celery-python and --bullmq-dir
say where to find them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ops.bench import bus_fairness, bus_hops, bus_redis, bus_rivals, bus_takeover, bus_zmq

IDLE_S = 0.01
WINDOW = 64  # jobs open at a time where jobs are counted


@dataclass(frozen=True, slots=True)
class Run:
    """What the parts need to know. scale: more or less work than usual."""

    scale: float
    server: bus_redis.BenchRedis
    celery_python: str
    bullmq_dir: str

    def times(self, count: int, least: int = 1) -> int:
        """So many, scaled."""
        return max(least, int(count * self.scale))


Part = tuple[str, Callable[[Run], dict[str, Any]]]

# name -> (what is printed about it, the measurement)
PARTS: dict[str, Part] = {
    "zmq_latency": (
        "ZeroMQ: submit -> engine sees it; token ready -> client has it",
        lambda run: bus_zmq.measure_latency(run.times(2_000)),
    ),
    "zmq_idle": (
        "ZeroMQ: the same, after 10 ms of silence before each job",
        lambda run: bus_zmq.measure_latency(run.times(500), IDLE_S),
    ),
    "zmq_hops": (
        "ZeroMQ: the first again, hop by hop, p50 in us; from_gateway: without the client's half",
        lambda run: bus_hops.measure_hops(run.times(2_000)),
    ),
    "zmq_events": (
        "ZeroMQ: token events of 256 jobs at once, one client",
        lambda run: bus_zmq.measure_events(256, run.times(2_000, least=50)),
    ),
    "zmq_jobs": (
        f"ZeroMQ: one-token jobs, {WINDOW} open at a time",
        lambda run: bus_zmq.measure_jobs(run.times(10_000), WINDOW),
    ),
    "zmq_streams": (
        "ZeroMQ: streams that one worker runs at once",
        lambda run: bus_zmq.measure_open_streams(run.times(10_000)),
    ),
    "redis_latency": (
        "Redis: XADD -> engine sees it; token ready -> XREAD returns it",
        lambda run: bus_redis.measure_latency(run.server, run.times(1_000)),
    ),
    "redis_events": (
        "Redis: token events of 64 jobs at once, one reader",
        lambda run: bus_redis.measure_events(run.server, 64, run.times(1_000, least=50)),
    ),
    "redis_jobs": (
        f"Redis: one-token jobs with their replies, {WINDOW} open at a time",
        lambda run: bus_redis.measure_jobs(run.server, run.times(5_000), WINDOW),
    ),
    "redis_takeover": (
        "Redis: a worker is killed, another takes its jobs over; the default lease",
        lambda run: bus_takeover.measure_takeover(run.server, run.times(5)),
    ),
    "celery": (
        f"Celery: no-op tasks with their results, {WINDOW} open at a time, same Redis",
        lambda run: bus_rivals.measure_celery(
            run.server, run.celery_python, run.times(5_000), WINDOW
        ),
    ),
    "bullmq": (
        f"BullMQ: no-op jobs with their results, {WINDOW} open at a time, same Redis",
        lambda run: bus_rivals.measure_bullmq(run.server, run.bullmq_dir, run.times(5_000), WINDOW),
    ),
    "flood": (
        "Fairness: first token of one tenant, alone and beside another's 5,000 jobs",
        lambda run: bus_fairness.measure_flood(run.times(5_000), run.times(100)),
    ),
    "slow_reader": (
        "Fairness: time between tokens of 49 clients, beside a reader and beside one that stopped",
        lambda run: bus_fairness.measure_slow_reader(50, run.times(2_400)),
    ),
}

# Names for comparisons over time -> (part, number)
HEADLINES = {
    "bus.jobs_s.redis": ("redis_jobs", "jobs_per_s"),
    "bus.token_events_s.zmq": ("zmq_events", "tokens_per_s"),
    "bus.submit_to_engine_us.p50": ("zmq_latency", "submit_p50_us"),
    "bus.token_to_client_us.p50": ("zmq_latency", "token_p50_us"),
}


def main() -> None:
    """Run the parts asked for, and print a table and the JSON line."""
    args = _parse()
    results: dict[str, Any] = {}
    with bus_redis.BenchRedis() as server:
        run = Run(args.scale, server, args.celery_python, args.bullmq_dir)
        for name in args.only or PARTS:
            title, measure = PARTS[name]
            with server.client() as client:
                client.flushall()
            results[name] = measure(run)
            if not args.json:
                _show(title, results[name])
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    headlines = {
        name: results[part][number] for name, (part, number) in HEADLINES.items() if part in results
    }
    print(json.dumps({"bench": "bus", **machine, **headlines, **results}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), help="parts (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work than usual")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--celery-python", default="", help="an interpreter that has Celery")
    parser.add_argument("--bullmq-dir", default="", help="a node_modules directory with bullmq")
    return parser.parse_args()


def _show(title: str, numbers: dict[str, Any]) -> None:
    shown = (
        f"{key} {value:,}" if isinstance(value, int | float) else f"{key} {value}"
        for key, value in numbers.items()
    )
    print(f"{title}\n    {'  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
