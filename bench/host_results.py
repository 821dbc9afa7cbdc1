"""What needs no GPU, as result lines: ring, bus, scheduler and the CPU engine beside its rivals.

    python -m bench.host_results OUT.jsonl [--parts ring bus scheduler cpu] [--repeats 3]
        [--batches 1 8 16] [--llama-python PYTHON] [--celery-python PYTHON]
        [--bullmq-dir NODE_MODULES]

Each part is the bench command of the same name in a process of its own; the median of its repeats
counts (of the CPU engine, its own best rounds). Meant for a machine with nothing else to do: the
load before each part is part of its lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import ResultFile

_UNITS = {
    "ring.rtt_us.p50": "us",
    "bus.jobs_s.redis": "jobs/s",
    "bus.token_events_s.zmq": "events/s",
    "bus.submit_to_engine_us.p50": "us",
    "bus.token_to_client_us.p50": "us",
    "host_us_per_step.b256": "us",
    "cpu.smollm2.b1.vs_llama_cpp": "ratio",
    "cpu.smollm2.b8.vs_transformers": "ratio",
    "cpu.smollm2.b8.vs_llama_cpp": "ratio",
}
_PARTS = ("ring", "bus", "scheduler", "cpu")


def run(*command: str) -> dict[str, Any]:
    """A bench's last line; what it prints before goes to the terminal."""
    done = subprocess.run(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}")
    print(*lines[:-1], sep="\n", flush=True)
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def numbers_of(part: str, args: argparse.Namespace) -> dict[str, float]:
    """One run of a part: the numbers that have a name here."""
    if part == "ring":
        line = run("ops.bench.ring")
    elif part == "bus":
        only = ["zmq_latency", "zmq_events", "redis_jobs"]
        rivals: list[str] = []
        if args.celery_python:
            only.append("celery")
            rivals += ["--celery-python", args.celery_python]
        if args.bullmq_dir:
            only.append("bullmq")
            rivals += ["--bullmq-dir", args.bullmq_dir]
        line = run("ops.bench.bus", "--only", *only, *rivals)
    elif part == "scheduler":
        results = run("ops.bench.scheduler")["results"]
        full = [row for row in results if row["rows"] == 256 and row["one_ahead"]]
        line = {"host_us_per_step.b256": full[0]["total_p50_us"]}
    else:
        rivals = ["--llama-python", args.llama_python] if args.llama_python else []
        repeats = str(args.repeats)
        sizes = [str(batch) for batch in args.batches]
        line = run("ops.bench.engine_cpu", "--repeats", repeats, "--batches", *sizes, *rivals)
    return {what: float(line[what]) for what in _UNITS if what in line} | _beside(line)


def _beside(line: dict[str, Any]) -> dict[str, float]:
    """Rates of the systems that were measured beside ours."""
    return {
        what: float(value)
        for what, value in line.items()
        if isinstance(value, (int, float)) and what.endswith(("decode_tok_s", "prefill_tok_s"))
    }


def main() -> None:
    """Run the parts and write their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16], help="of part cpu")
    parser.add_argument("--llama-python", default="")
    parser.add_argument("--celery-python", default="")
    parser.add_argument("--bullmq-dir", default="")
    args = parser.parse_args()
    file = ResultFile(args.out)
    for part in args.parts:
        load = round(os.getloadavg()[0], 2)
        count = 1 if part == "cpu" else args.repeats
        runs = [numbers_of(part, args) for _ in range(count)]
        for what in runs[0]:
            values = [numbers[what] for numbers in runs]
            unit = _UNITS.get(what, "tok/s")
            file.add(what, statistics.median(values), unit, runs=values, load=load)


if __name__ == "__main__":
    main()
