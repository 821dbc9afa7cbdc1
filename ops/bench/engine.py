"""Tokens per second of the engine loop, in-process: scheduler, runner, sampler; no bus.

`tokenbus bench engine --model qwen3-0.6b --requests 64`. A shape name runs random weights at true
shapes; a model directory or .gguf file runs the real ones. Prompts are random, nothing ends early.
Each line of a `--case b:in:out` list is one workload. Prints a line per case and one JSON object
last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.loop import EngineLoop, freeze_heap
from engine.scheduler import Scheduler
from engine.stats import PHASES
from ops.bench.load import Workload, drive
from ops.bench.roofline import decode_floor_tok_s
from ops.bench.shapes import SHAPES, write_shape


def main(argv: list[str] | None = None) -> int:
    """Run the cases and print the results."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in SHAPES
        path = write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        config = EngineConfig(
            model_path=str(path),
            model_name=args.model,
            device=args.device,
            load_format="dummy" if is_shape else "auto",
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            block_size_tokens=args.block_size,
            kv_cache_bytes=args.kv_cache_bytes,
            deterministic=args.deterministic,
            enable_prefix_cache=False,
        )
        report = run(config, args.case, args.temperature, args.quiet)
    print(json.dumps(report))
    return 0


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine that is warm. Seconds: until the runner was made; until the first token, that
    included; for what is captured in idle moments."""

    loop: EngineLoop
    ready_s: float
    first_token_s: float
    prepare_s: float


def open_engine(config: EngineConfig) -> OpenEngine:
    """Build the runner, run one request, capture what idle moments would."""
    from engine.build import build_runner

    started = time.perf_counter()
    runner = build_runner(config)
    ready_s = time.perf_counter() - started
    loop = EngineLoop(runner, Scheduler(runner.info, config.enable_prefix_cache))
    started = time.perf_counter()
    drive(loop, Workload(1, 17, 4, runner.info.vocab_size), first_rid=1 << 40)
    first_token_s = ready_s + time.perf_counter() - started
    started = time.perf_counter()
    while runner.prepare():
        pass
    prepare_s = time.perf_counter() - started
    freeze_heap()
    return OpenEngine(loop, ready_s, first_token_s, prepare_s)


def run(
    config: EngineConfig, cases: list[tuple[int, int, int]], temperature: float, quiet: bool
) -> dict[str, Any]:
    """Build the runner, warm up, run each (requests, input_len, output_len)."""
    engine = open_engine(config)
    info = engine.loop.runner.info
    results = []
    for index, (num_requests, input_len, output_len) in enumerate(cases):
        load = Workload(
            num_requests, input_len, output_len, info.vocab_size, temperature=temperature
        )
        result = run_case(engine.loop, load, index)
        result["floor_tok_s"] = decode_floor_tok_s(
            config, num_requests, input_len + output_len // 2
        )
        results.append(result)
        if not quiet:
            print(_line(config.model_name, result), file=sys.stderr)
    return {
        "what": "engine",
        "model": config.model_name,
        "weights": config.load_format,
        "deterministic": config.deterministic,
        "info": asdict(info),
        "ready_s": round(engine.ready_s, 3),
        "first_token_s": round(engine.first_token_s, 3),
        "prepare_s": round(engine.prepare_s, 3),
        "cases": results,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def run_case(loop: EngineLoop, load: Workload, index: int) -> dict[str, Any]:
    """One pass to compile kernels and capture graphs at these sizes, and one that counts."""
    warm = replace(load, output_len=4, seed=99)
    drive(loop, warm, first_rid=(index + 1) << 32)
    loop.stats.report(loop.scheduler)
    times, _ = drive(loop, load, first_rid=(index + 1) << 33)
    stats = loop.stats.report(loop.scheduler)
    return {
        "requests": load.num_requests,
        "input_len": load.input_len,
        "output_len": load.output_len,
        **asdict(times),
        **{f"{phase}_us": stats[f"{phase}_us"] for phase in PHASES},
        "steps": stats["interval_steps"],
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "triton": triton.__version__, "machine": name}


def _line(model: str, r: dict[str, Any]) -> str:
    host_us = sum(r[f"{phase}_us"] for phase in PHASES if phase != "collect")
    return (
        f"{model} b{r['requests']} {r['input_len']}/{r['output_len']}: {r['total_s']:.2f} s, "
        f"decode {r['decode_tok_s']:.0f} tok/s (floor {r['floor_tok_s']:.0f}), "
        f"ttft {r['ttft_ms_p50']:.1f} ms, itl {r['itl_ms_p50']:.3f}/{r['itl_ms_p99']:.3f} ms, "
        f"host {host_us:.0f} us/step"
    )


def parse_case(text: str) -> tuple[int, int, int]:
    """`requests:input_len:output_len` -> three positive numbers."""
    parts = tuple(int(part) for part in text.split(":"))
    if len(parts) != 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use requests:input_len:output_len")
    return parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenbus bench engine", description=__doc__)
    parser.add_argument("--model", default="tiny", help=f"path or one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--case",
        type=parse_case,
        nargs="+",
        default=[(1, 128, 64), (8, 128, 64)],
        metavar="REQUESTS:IN:OUT",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-num-seqs", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print only the JSON line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
