"""Where the time of engine steps goes: host phases and kernels on one time line.

`tokenbus profile --model qwen3-0.6b --case 8:1024:64 --steps 20 --trace trace.json`. The trace
opens in chrome://tracing or Perfetto. Prints the kernels by total time, the share of the time in
which the device had work, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.loop import EngineLoop, freeze_heap
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from ops.bench.engine import parse_case
from ops.bench.load import Recorder, Workload, drive
from ops.bench.shapes import SHAPES, write_shape

MAX_PAUSES = 8
"""Of the device, named in a summary."""


class MarkedRunner:
    """A runner whose launches and collects are ranges on the profiler's time line."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.info = runner.info
        self.is_async = runner.is_async

    def launch(self, plan: StepPlan) -> None:
        """Launch inside a named range."""
        from torch.profiler import record_function

        with record_function(f"launch rows={len(plan.rows)} tokens={int(plan.num_new.sum())}"):
            self._runner.launch(plan)

    def collect(self) -> StepResult:
        """Collect inside a named range."""
        from torch.profiler import record_function

        with record_function("collect"):
            result: StepResult = self._runner.collect()
        return result

    def prepare(self) -> bool:
        """Whatever the runner can do ahead."""
        return bool(self._runner.prepare())

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()


def profile_steps(
    config: EngineConfig, case: tuple[int, int, int], num_steps: int, prompts: bool, trace: Path
) -> dict[str, Any]:
    """Profile num_steps steps of a workload: decode steps, or from the first prompt on."""
    from engine.build import build_runner

    runner = MarkedRunner(build_runner(config))
    loop = EngineLoop(runner, Scheduler(runner.info, False))
    num_requests, input_len, output_len = case
    load = Workload(num_requests, input_len, output_len, runner.info.vocab_size)
    drive(loop, Workload(num_requests, input_len, 4, runner.info.vocab_size), first_rid=1 << 32)
    while runner.prepare():
        pass
    freeze_heap()
    recorder = started(loop, load, skips_prompts=not prompts)
    report = profile_loop(loop, recorder, num_steps, trace, config.device != "cpu")
    runner.close()
    return report


def started(loop: EngineLoop, load: Workload, skips_prompts: bool = True) -> Recorder:
    """Submit a workload; with skips_prompts step until every run has its first token."""
    recorder = Recorder()
    recorder.due.extend((0, submit) for submit in load.submits(1))
    while skips_prompts and recorder.num_started < load.num_requests:
        loop.step(recorder, recorder)
    return recorder


def profile_loop(
    loop: EngineLoop, recorder: Recorder, num_steps: int, trace: Path, on_gpu: bool
) -> dict[str, Any]:
    """Profile the next num_steps steps into a Chrome trace and sum them up."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            loop.step(recorder, recorder)
    profiler.export_chrome_trace(str(trace))
    return summarize(json.loads(trace.read_text())["traceEvents"])


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernel time by name and grid, the device's busy share and its longest pauses, from a Chrome
    trace's events.

    Kernels overlap where one starts early and waits for the one before: `own_us` counts only what a
    kernel adds, from the end of all that began before it.
    """
    kernels: dict[tuple[str, str], dict[str, Any]] = {}
    pauses: dict[str, float] = defaultdict(float)
    busy_us = end = 0.0
    begin_us = None
    last = ""
    works = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in sorted(works, key=lambda e: float(e["ts"])):
        begin, stop, name = event["ts"], event["ts"] + event["dur"], event["name"][:90]
        begin_us = begin if begin_us is None else begin_us
        grid = "x".join(str(n) for n in event.get("args", {}).get("grid", []))
        kernel = kernels.setdefault(
            (name, grid), {"name": name, "grid": grid, "us": 0.0, "own_us": 0.0, "calls": 0}
        )
        own_us = max(0.0, stop - max(begin, end))
        kernel["us"] += event["dur"]
        kernel["own_us"] += own_us
        kernel["calls"] += 1
        if last and begin > end:
            pauses[f"{last} -> {name}"] += begin - end
        busy_us += own_us
        end, last = max(end, stop), name
    span_us = end - (begin_us or 0.0)
    for kernel in kernels.values():
        kernel["us"], kernel["own_us"] = round(kernel["us"], 1), round(kernel["own_us"], 1)
    longest = sorted(pauses.items(), key=lambda item: -item[1])[:MAX_PAUSES]
    return {
        "kernels": sorted(kernels.values(), key=lambda kernel: -kernel["own_us"]),
        "pauses_us": {pair: round(us, 1) for pair, us in longest},
        "busy_us": round(busy_us, 1),
        "span_us": round(span_us, 1),
        "gpu_active_pct": round(100 * busy_us / span_us, 2) if span_us else 0.0,
    }


def main(argv: list[str] | None = None) -> int:
    """Profile one case and print the summary."""
    parser = argparse.ArgumentParser(prog="tokenbus profile", description=__doc__)
    parser.add_argument("--model", default="tiny", help=f"path or one of {', '.join(SHAPES)}")
    parser.add_argument("--case", type=parse_case, default=(8, 1024, 64), metavar="REQUESTS:IN:OUT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", action="store_true", help="start at the first prompt chunk")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--trace", type=Path, default=Path("trace.json"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in SHAPES
        path = write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        config = EngineConfig(
            model_path=str(path),
            model_name=args.model,
            device=args.device,
            load_format="dummy" if is_shape else "auto",
            max_model_len=args.max_model_len,
            deterministic=args.deterministic,
            enable_prefix_cache=False,
        )
        report = profile_steps(config, args.case, args.steps, args.prompts, args.trace)
    for kernel in report["kernels"][:25]:
        times = f"{kernel['own_us']:10.1f} us {kernel['calls']:6d} x"
        print(f"{times}  {kernel['name']} {kernel['grid']}", file=sys.stderr)
    print(f"device busy {report['gpu_active_pct']} %, trace in {args.trace}", file=sys.stderr)
    print(json.dumps({"what": "profile", "model": args.model, "case": args.case, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
