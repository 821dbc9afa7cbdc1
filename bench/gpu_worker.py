"""A whole worker on a GPU, over ZeroMQ: time to first token and between tokens at the client.

`python -m bench.gpu_worker MODEL [--jobs 1 8 64] [--out results.jsonl]`. Starts `tokenbus serve`,
sends random prompts as token ids over a new connection, prints a line per batch of jobs and one
JSON object last. Run `ops.bench.engine` on the same model beside it: the difference is the bus's
share; or let the fake model stand in for the engine:
`python -m bench.gpu_worker fake --device cpu --settle-s 2 --max-id 500 --set fake.step_ms=0.5`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import ResultFile
from tokenbus import AsyncClient


async def run_job(
    client: AsyncClient, prompt: list[int], new_tokens: int
) -> tuple[float, list[float]]:
    """Milliseconds to the first token, and between events."""
    begin = time.perf_counter()
    marks = []
    stream = client.generate(
        input_ids=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True
    )
    async for token in stream:
        marks.extend([time.perf_counter()] * len(token.ids))
    if len(marks) != new_tokens:
        raise RuntimeError(f"{len(marks)} tokens came, {new_tokens} were asked for")
    gaps = np.diff(np.array(marks)) * 1e3
    return (marks[0] - begin) * 1e3, gaps.tolist()


def prompts_of(jobs: int, seed: int, args: argparse.Namespace) -> list[list[int]]:
    """Other prompts for another seed, which no cache has."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, args.max_id, args.input_len).tolist() for _ in range(jobs)]


async def measure(endpoint: str, jobs: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """All jobs at once over one connection, `rounds` times; the first time the connection is new.
    The rates are those of the last time."""
    first_ms: list[float] = []
    later_ms: list[float] = []
    async with AsyncClient(zmq=endpoint) as client:
        for turn in range(args.rounds):
            prompts = prompts_of(jobs, 1000 * seed + turn, args)
            begin = time.perf_counter()
            results = await asyncio.gather(
                *(run_job(client, prompt, args.output_len) for prompt in prompts)
            )
            total_s = time.perf_counter() - begin
            (later_ms if turn else first_ms).extend(first for first, _ in results)
    gaps = np.concatenate([gap for _, gap in results])
    return {
        "jobs": jobs,
        "ttft_ms_p50": round(float(np.percentile(later_ms or first_ms, 50)), 3),
        "new_connection_ttft_ms_p50": round(float(np.percentile(first_ms, 50)), 3),
        "itl_ms_p50": round(float(np.percentile(gaps, 50)), 4),
        "itl_ms_mean": round(float(gaps.mean()), 4),
        "itl_ms_p99": round(float(np.percentile(gaps, 99)), 4),
        "tok_s": round(jobs * args.output_len / total_s, 1),
    }


def num_prepared(log: Path) -> int:
    """How often the engine has said that its idle work is done."""
    return log.read_bytes().count(b"engine.prepared")


def wait_prepared(log: Path, before: int, seconds: float) -> None:
    """Wait until it says so once more than `before`, or for so long: it does not if there was
    nothing to do."""
    end = time.monotonic() + seconds
    while num_prepared(log) == before and time.monotonic() < end:
        time.sleep(0.05)


def measure_all(endpoint: str, log: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each number of jobs, once the engine has captured what it needs for it."""
    asyncio.run(measure(endpoint, 1, 0, args))
    wait_prepared(log, 0, args.settle_s)
    results = []
    for index, jobs in enumerate(args.jobs):
        before = num_prepared(log)
        asyncio.run(measure(endpoint, jobs, 2 * index + 1, args))
        wait_prepared(log, before, args.settle_s / 4)
        results.append(asyncio.run(measure(endpoint, jobs, 2 * index + 2, args)))
        print(results[-1], file=sys.stderr, flush=True)
    return results


def report(cases: list[dict[str, Any]], ready_s: float, model: str, results: ResultFile) -> None:
    """Result lines: what a client sees, per number of jobs at once."""
    name = f"{model}.worker_zmq"
    results.add(f"{name}.ready_s", ready_s, "s")
    for case in cases:
        for field in ("ttft_ms_p50", "new_connection_ttft_ms_p50", "itl_ms_p50", "itl_ms_p99"):
            results.add(f"{name}.{field}.b{case['jobs']}", case[field], "ms", weights="real")
        results.add(f"{name}.tok_s.b{case['jobs']}", case["tok_s"], "tok/s", weights="real")


def main() -> int:
    """Start the worker, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="of all jobs, on a connection")
    parser.add_argument("--max-id", type=int, default=40_000, help="prompts have ids below it")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, for serve")
    parser.add_argument("--settle-s", type=float, default=30.0, help="to wait for graphs")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="", help="what result lines call the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as data_dir:
        command = [sys.executable, "-c", "from ops.cli import main; main()", "serve", "--json"]
        command += ["--model", args.model, "--device", args.device]
        command += ["--redis", "none", "--zmq", "tcp://127.0.0.1:0", "--data-dir", data_dir]
        for setting in ("engine.max_model_len=4096", *args.set):
            command += ["--set", setting]
        log = Path(data_dir) / "worker.log"
        with log.open("wb") as errors:
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            begin = time.perf_counter()
            assert worker.stdout is not None
            ready = next(
                event for event in map(json.loads, worker.stdout) if event.get("event") == "ready"
            )
            ready_s = time.perf_counter() - begin
            results = measure_all(ready["zmq"], log, args)
        finally:
            worker.terminate()
            code = worker.wait(60)
            if code:
                print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
    if args.out is not None:
        report(results, ready_s, args.name or Path(args.model).stem, ResultFile(args.out))
    print(json.dumps({"what": "gpu_worker", "ready_s": ready_s, "exit": code, "cases": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
