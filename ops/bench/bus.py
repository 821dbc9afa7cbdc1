"""`tokenbus bench bus`: what the bus costs without a model. One JSON line last.

Latency is measured with the benchmark at both ends of an idle broker, on one clock; throughput with
the real engine process, whose fake model computes nothing. Parts are functions that return numbers;
a door of its own (Redis) is one more entry in `PARTS`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from typing import Any

from ops.bench import bus_zmq

Numbers = dict[str, float]

# name -> (what is printed about it, the measurement at a scale of 1.0)
PARTS: dict[str, tuple[str, Callable[[float], Numbers]]] = {
    "zmq_latency": (
        "ZeroMQ: submit -> engine sees it; token ready -> client has it",
        lambda scale: bus_zmq.measure_latency(int(2_000 * scale)),
    ),
    "zmq_events": (
        "ZeroMQ: token events of 256 jobs at once, one client",
        lambda scale: bus_zmq.measure_events(256, max(50, int(2_000 * scale))),
    ),
    "zmq_jobs": (
        "ZeroMQ: one-token jobs, 64 open at a time",
        lambda scale: bus_zmq.measure_jobs(int(10_000 * scale), 64),
    ),
    "zmq_streams": (
        "ZeroMQ: open streams of one worker",
        lambda scale: bus_zmq.measure_open_streams(int(10_000 * scale)),
    ),
}


def main() -> None:
    """Run the parts asked for, and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), help="parts (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work than usual")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.only or PARTS:
        title, measure = PARTS[name]
        results[name] = measure(args.scale)
        if not args.json:
            numbers = "  ".join(f"{key} {value:,}" for key, value in results[name].items())
            print(f"{title}\n    {numbers}", flush=True)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    print(json.dumps({"bench": "bus", **machine, **results}))


if __name__ == "__main__":
    main()
