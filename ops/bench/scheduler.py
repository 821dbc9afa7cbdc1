"""Host work per decode step, by phase, with a runner that costs nothing.

`python -m ops.bench.scheduler`. The loop is the real one, records are encoded, and there is no ring
and no model. All rows decode; prompts are of mixed lengths, so that block boundaries, and with them
block allocation and prefix registration, spread over the steps as in service. Prints a line per
batch size and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque

import numpy as np

from broker.ring.records import Kind, Submit, encode_submit
from engine.loop import EngineLoop, freeze_heap
from engine.plan import RunnerInfo, StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.stats import PHASES, StepStats


class NullRunner:
    """Returns the same token for every row, at once."""

    def __init__(self, info: RunnerInfo, is_async: bool) -> None:
        self.info = info
        self.is_async = is_async
        self._launched: deque[StepPlan] = deque()
        self._tokens = np.full(info.max_num_seqs, 7, np.int32)
        self._bad = np.zeros(info.max_num_seqs, np.bool_)

    def launch(self, plan: StepPlan) -> None:
        """Note the plan."""
        self._launched.append(plan)

    def collect(self) -> StepResult:
        """The oldest plan's tokens."""
        plan = self._launched.popleft()
        count = int(np.count_nonzero(plan.sample))
        return StepResult(plan.step_id, self._tokens[:count], self._bad[:count])

    def prepare(self) -> bool:
        """Nothing can be done ahead."""
        return False

    def close(self) -> None:
        """Nothing to free."""


class Bus:
    """A source that holds prepared records and a sink that counts bytes."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, bytes]] = deque()
        self.num_bytes = 0

    def read(self, max_records: int) -> list[tuple[int, bytes]]:
        """Up to so many prepared records."""
        return [self.pending.popleft() for _ in range(min(max_records, len(self.pending)))]

    def wait(self, timeout_s: float) -> bool:
        """Never blocks."""
        return bool(self.pending)

    def try_write(self, kind: int, payload: bytes) -> bool:
        """Takes everything."""
        self.num_bytes += len(payload)
        return True

    def wait_room(self, payload_bytes: int, timeout_s: float) -> None:
        """Never full."""


class PhaseTimes(StepStats):
    """Keeps every reading instead of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[tuple[int, ...]] = []

    def add_times(self, *marks_ns: int) -> None:
        """Keep one pass."""
        self.readings.append(marks_ns)


def measure(num_rows: int, num_steps: int, is_async: bool, block_size: int) -> dict[str, float]:
    """Median and 95th percentile of the host's microseconds per step, and the median by phase."""
    length = 512 + num_steps + 64
    info = RunnerInfo(
        model="null",
        architecture="null",
        device="none",
        dtype="none",
        vocab_size=50_000,
        max_model_len=length,
        eos_token_ids=(2,),
        block_size=block_size,
        num_blocks=num_rows * (length // block_size + 1),
        max_num_seqs=num_rows,
        max_num_batched_tokens=16_384,
        load_s=0.0,
        weight_bytes=0,
        kv_bytes=0,
    )
    loop = EngineLoop(NullRunner(info, is_async), Scheduler(info))
    times = PhaseTimes()
    loop.stats = times
    bus = Bus()
    rng = np.random.default_rng(1)
    for rid in range(num_rows):
        prompt = rng.integers(10, 50_000, int(rng.integers(128, 512)), dtype=np.int32)
        stop = np.array([2], np.int32)
        submit = Submit(rid + 1, prompt, prompt[:0], stop, max_tokens=num_steps + 64)
        bus.pending.append((Kind.SUBMIT, encode_submit(submit)))
    freeze_heap()
    while bus.pending or not loop.scheduler.rows.decodable.all():
        loop.step(bus, bus)
    times.readings.clear()
    for _ in range(num_steps):
        loop.step(bus, bus)
    gc.enable()
    gc.unfreeze()
    return summary(np.diff(np.array(times.readings), axis=1) / 1e3)


def summary(phases_us: np.ndarray) -> dict[str, float]:
    """Percentiles of the steps. phases_us: [steps, phases]."""
    total_us = phases_us.sum(axis=1)
    result = {
        "total_p50_us": float(np.median(total_us)),
        "total_p95_us": float(np.percentile(total_us, 95)),
    }
    for name, column in zip(PHASES, phases_us.T, strict=True):
        result[f"{name}_p50_us"] = float(np.median(column))
    return {name: round(value, 1) for name, value in result.items()}


def main() -> None:
    """Measure a few batch sizes and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], metavar="ROWS")
    parser.add_argument("--steps", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--repeats", type=int, default=3, metavar="TIMES")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    args = parser.parse_args()
    results = []
    for is_async in (False, True):
        for rows in args.rows:
            runs = [
                measure(rows, args.steps, is_async, args.block_size) for _ in range(args.repeats)
            ]
            best = min(runs, key=lambda run: run["total_p50_us"])
            spread = statistics.pstdev(run["total_p50_us"] for run in runs)
            results.append(
                {"rows": rows, "one_ahead": is_async, "spread_us": round(spread, 1), **best}
            )
            print(" ".join(f"{key}={value}" for key, value in results[-1].items()))
    print(json.dumps({"bench": "scheduler", "time": time.strftime("%F"), "results": results}))


if __name__ == "__main__":
    main()
