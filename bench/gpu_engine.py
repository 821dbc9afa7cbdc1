"""One model shape on one device: all of its engine numbers, from one engine that stays loaded.

    python -m bench.gpu_engine MODEL --out results.jsonl [--device cpu] [--batches 1 8 64 256]

MODEL is a shape (random weights) or a model. Decode and prompt rates, time to first token, and on
request the whole run of 256 requests, the host's work, the share of the time in which the device
works, and device allocations in steady state. With --deterministic names carry that word.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import BATCHES, ResultFile
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.stats import PHASES
from ops.bench.engine import OpenEngine, open_engine, run_case
from ops.bench.load import Recorder, Workload, drive
from ops.bench.profile import profile_loop, started
from ops.bench.roofline import decode_floor_tok_s
from ops.bench.shapes import SHAPES, write_shape

EXTRAS = ("ttft", "run256", "host", "allocations")
NUM_TTFT = 9
NUM_STEPS = 24
HOST_ROUNDS = 9
"""Of NUM_STEPS: a machine's other work makes the host's three times as slow for seconds."""


class ShapeBench:
    """The measurements of one shape; results go to one file."""

    def __init__(
        self, config: EngineConfig, engine: OpenEngine, results: ResultFile, input_len: int
    ) -> None:
        self.config = config
        self.engine = engine
        self.results = results
        self.input_len = input_len
        self._next_rid = 1 << 50
        mode = "deterministic." if config.deterministic else ""
        self.name = f"{config.model_name}.{mode}"

    def load(self, num_requests: int, output_len: int, seed: int = 0) -> Workload:
        """Random prompts for this model."""
        vocab_size = self.engine.loop.runner.info.vocab_size
        return Workload(num_requests, self.input_len, output_len, vocab_size, seed=seed)

    def decode(self, batches: list[int], output_len: int) -> None:
        """Tokens a second while all rows decode, and prompt tokens a second before that."""
        for index, batch in enumerate(batches):
            result = run_case(self.engine.loop, self.load(batch, output_len), index)
            floor = decode_floor_tok_s(self.config, batch, self.input_len + output_len // 2)
            kept = ("itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "total_s", "steps")
            details = {key: result[key] for key in kept}
            details |= {f"{phase}_us": result[f"{phase}_us"] for phase in PHASES}
            self.add(f"decode_tok_s.b{batch}", result["decode_tok_s"], "tok/s", floor, **details)
            self.add(f"prefill_tok_s.b{batch}", result["prefill_tok_s"], "tok/s")

    def ttft(self) -> None:
        """Median time to first token of one prompt alone."""
        times = []
        for index in range(NUM_TTFT):
            load = self.load(1, 4, seed=100 + index)
            times.append(drive(self.engine.loop, load, self._rids())[0].ttft_ms_p50)
        spread = {"min": min(times), "max": max(times)}
        self.add("ttft_ms.b1", float(np.median(times)), "ms", **spread)

    def run256(self, num_requests: int, output_len: int) -> None:
        """Seconds for a whole run."""
        times, _ = drive(self.engine.loop, self.load(num_requests, output_len), self._rids())
        what = f"run_{num_requests}x{self.input_len}x{output_len}_s"
        self.add(what, times.total_s, "s", tok_s=round(times.tok_s, 1))

    def host(self, num_requests: int, trace: Path) -> None:
        """Host microseconds a decode step, the median of rounds, and the share of time in which
        the device works."""
        loop = self.engine.loop
        # The first rows to start have decoded for some time when the last prompt is done.
        output_len = (HOST_ROUNDS + 1) * NUM_STEPS + 8 + num_requests // 4
        recorder = started(loop, self.load(num_requests, output_len))
        rounds = sorted((host_round(loop, recorder) for _ in range(HOST_ROUNDS)), key=host_us)
        middle, each = rounds[HOST_ROUNDS // 2], [round(host_us(phases), 1) for phases in rounds]
        what = f"host_us_per_step.b{num_requests}"
        self.results.add(what, host_us(middle), "us", phases_us=middle, rounds_us=each)
        on_gpu = torch.cuda.is_available() and self.config.device != "cpu"
        report = profile_loop(loop, recorder, NUM_STEPS // 4, trace, on_gpu)
        what = f"gpu_active_pct.b{num_requests}"
        parts = {"kernels": report["kernels"][:16], "pauses_us": report["pauses_us"]}
        self.results.add(what, report["gpu_active_pct"], "%", **parts)
        while recorder.num_finished < num_requests:
            loop.step(recorder, recorder)
        with gzip.open(f"{trace}.gz", "wb") as file:
            file.write(trace.read_bytes())
        trace.unlink()

    def allocations(self, num_requests: int) -> None:
        """Device allocations a step while rows decode."""
        loop = self.engine.loop
        recorder = started(loop, self.load(num_requests, NUM_STEPS + 24))
        for _ in range(8):
            loop.step(recorder, recorder)
        before = count_allocations()
        for _ in range(NUM_STEPS):
            loop.step(recorder, recorder)
        made = count_allocations() - before
        self.results.add("device_allocations_per_step", made / NUM_STEPS, "1", rows=num_requests)
        while recorder.num_finished < num_requests:
            loop.step(recorder, recorder)

    def add(self, what: str, value: float, unit: str, *args: Any, **details: Any) -> None:
        """A result of this shape."""
        details["weights"] = "random" if self.config.load_format == "dummy" else "real"
        self.results.add(self.name + what, value, unit, *args, **details)

    def _rids(self) -> int:
        self._next_rid += 1 << 20
        return self._next_rid


def host_round(loop: EngineLoop, recorder: Recorder) -> dict[str, float]:
    """Microseconds of each of PHASES in a step, the mean of NUM_STEPS."""
    loop.stats.report(loop.scheduler)
    for _ in range(NUM_STEPS):
        loop.step(recorder, recorder)
    stats = loop.stats.report(loop.scheduler)
    return {phase: stats[f"{phase}_us"] for phase in PHASES}


def host_us(phases: Mapping[str, float]) -> float:
    """Of a step's microseconds those that the host works."""
    return sum(us for phase, us in phases.items() if phase != "collect")


def count_allocations() -> int:
    """Device allocations since the start; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("model")
    found.add_argument("--out", type=Path, default=Path("results.jsonl"))
    found.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    found.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    found.add_argument("--input-len", type=int, default=1024)
    found.add_argument("--output-len", type=int, default=256)
    found.add_argument("--extras", nargs="*", default=["ttft"], choices=EXTRAS)
    found.add_argument("--run", default="256:1024", help="requests:output_len of run256")
    found.add_argument("--max-model-len", type=int, default=4096)
    found.add_argument("--deterministic", action="store_true")
    found.add_argument("--trace", type=Path, default=Path("trace.json"))
    return found


def main() -> int:
    """Measure one shape."""
    args = parser().parse_args()
    results = ResultFile(args.out)
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in SHAPES
        path = write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        config = EngineConfig(
            model_path=str(path),
            model_name=args.model if is_shape else path.stem,
            device=args.device,
            load_format="dummy" if is_shape else "auto",
            max_model_len=args.max_model_len,
            deterministic=args.deterministic,
            enable_prefix_cache=False,
        )
        bench = ShapeBench(config, open_engine(config), results, args.input_len)
        bench.add("prepare_s", bench.engine.prepare_s, "s")
        bench.decode(args.batches, args.output_len)
        run_requests, run_output = (int(part) for part in args.run.split(":"))
        most = max(args.batches, default=1)
        if "ttft" in args.extras:
            bench.ttft()
        if "allocations" in args.extras:
            bench.allocations(min(8, most))
        if "host" in args.extras:
            bench.host(most, args.trace)
        if "run256" in args.extras:
            bench.run256(run_requests, run_output)
        bench.engine.loop.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
