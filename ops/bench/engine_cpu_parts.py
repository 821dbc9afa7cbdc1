"""Where the time of a decode step of the CPU engine goes, part by part.

    python -m ops.bench.engine_cpu_parts [--batches 1 8] [--threads 1] [--quantization auto]

SmolLM2, prompts of 64 random tokens, steps 17 to 56 behind them, greedy. The functions of each part
are wrapped in a clock that costs some 0.3 us a call; the time of a part that is called inside
another counts for the inner one alone. Tenth percentiles of the steps, part by part, so that other
load on the machine adds little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.threads import set_thread_waiting
from ops.models import resolve

if TYPE_CHECKING:
    from engine.plan import Runner

_PROMPT_TOKENS = 64
_WARM_STEPS, _STEPS = 16, 40
_PARTS = {
    "products of the layers": (
        ("engine.cpu.int8", "_normed_product"),
        ("engine.cpu.int8", "_add_product"),
        ("engine.cpu.linear", "NormedLinear.__call__"),
        ("engine.cpu.linear", "AddedLinear.add_to"),
    ),
    "rotations before products": (
        ("engine.cpu.int8", "TokenRotator.__call__"),
        ("engine.cpu.int8", "TokenRotator.weighted"),
    ),
    "attention": (("engine.cpu.attention", "DecodeAttention.__call__"),),
    "keys and values kept": (
        ("engine.cpu.contexts", "DecodeContexts.layer"),
        ("engine.cpu.kv_cache", "KvCache.write"),
    ),
    "rotary positions": (("engine.cpu.decoder", "_rotate"),),
    "gates": (("engine.cpu.decoder", "_gated"),),
    "head": (("engine.cpu.head", "LmHead.__call__"),),
    "sampling": (("engine.cpu.runner", "sample"),),
    "inputs of the step": (("engine.cpu.runner", "build_step_inputs"),),
}


class PartClock:
    """Seconds spent in each part since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._inner_s = [0.0]  # by depth: what parts inside took

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted for `part`."""

        def run(*args: Any) -> Any:
            self._inner_s.append(0.0)
            start = time.perf_counter()
            result = function(*args)
            whole_s = time.perf_counter() - start
            self._seconds[part] += whole_s - self._inner_s.pop()
            self._inner_s[-1] += whole_s
            return result

        return run

    def take(self) -> dict[str, float]:
        """Seconds by part; counting begins anew."""
        taken, self._seconds = self._seconds, dict.fromkeys(_PARTS, 0.0)
        return taken


def install(clock: PartClock) -> None:
    """Wrap the functions of all parts."""
    import importlib

    for part, functions in _PARTS.items():
        for module, name in functions:
            *owners, attribute = name.split(".")
            place: Any = importlib.import_module(module)
            for owner in owners:
                place = getattr(place, owner)
            setattr(place, attribute, clock.timed(part, getattr(place, attribute)))


def measure(runner: Runner, clock: PartClock, batch: int) -> dict[str, float]:
    """Milliseconds of a step with this many rows, by part and as a whole: tenth percentiles."""
    import numpy as np

    from broker.ring.records import Submit
    from engine.scheduler import Scheduler

    scheduler = Scheduler(runner.info, enable_prefix_cache=False)
    chooser, none = np.random.default_rng(0), np.zeros(0, np.int32)
    for rid in range(1, batch + 1):
        ids = chooser.integers(1000, 40000, _PROMPT_TOKENS).astype(np.int32)
        scheduler.submit(Submit(rid, ids, none, none, _WARM_STEPS + _STEPS + 8))
    steps: list[dict[str, float]] = []
    while (plan := scheduler.plan()) is not None:
        start = time.perf_counter()
        runner.launch(plan)
        result = runner.collect()
        whole_s = time.perf_counter() - start
        scheduler.launched()
        scheduler.complete(result)
        parts = clock.take()
        if plan.num_decode == batch:
            rest = whole_s - sum(parts.values())
            steps.append({**parts, "everything else": rest, "whole step": whole_s})
    counted = steps[_WARM_STEPS : _WARM_STEPS + _STEPS]
    return {
        part: 1e3 * statistics.quantiles((step[part] for step in counted), n=10)[0]
        for part in counted[0]
    }


def main() -> None:
    """Build the runner, measure, print a table and a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a .gguf file; default: smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", choices=("auto", "packed", "none"), default="auto")
    args = parser.parse_args()
    set_thread_waiting()
    from engine.build import build_runner
    from engine.config import EngineConfig

    config = EngineConfig(
        model_path=str(args.model or resolve("smollm2-135m").path),
        device="cpu",
        quantization=args.quantization,
        num_threads=args.threads,
        kv_cache_bytes=600 << 20,
    )
    clock = PartClock()
    install(clock)
    runner = build_runner(config)
    while runner.prepare():
        pass  # what an engine does while it waits for its first job
    results = {batch: measure(runner, clock, batch) for batch in args.batches}
    for part in results[args.batches[0]]:
        print(f"{part:<26}", *(f"{results[batch][part]:8.2f} ms" for batch in args.batches))
    rounded = {
        f"b{batch}": {part: round(ms, 3) for part, ms in parts.items()}
        for batch, parts in results.items()
    }
    print(json.dumps({"bench": "engine_cpu_parts", "threads": args.threads, "ms": rounded}))


if __name__ == "__main__":
    main()
