"""The time of whole decode steps by variant: attention tile, shared memory, product tiles.

    python -m bench.step_search MODEL --rows 8 --out results.jsonl
        [--attention 64,4,3,2,tma ...] [--share 50 driver ...] [--small-gemm]
    python -m bench.step_search MODEL --rows 8 ... --list      # names the variants; needs no GPU

A kernel that is faster alone can make a step slower, since it shares processors, memory and power
with its neighbours: this decides what goes into kernels/tiles.py. MODEL is a shape (random weights)
or a model. Variants are tried one choice after the other, each time keeping the best so far. Every
one is captured anew and sees the same prompts and lengths. One that does not compile or fit is
named and passed over.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.report import ResultFile
from bench.step_variants import (
    BASE,
    Choice,
    StepTimer,
    Variant,
    VariantRefusedError,
    attention_tile,
    base_variant,
    choices,
    graph_size,
    share,
)
from engine.build import build_runner
from engine.config import EngineConfig
from engine.loader import read_spec
from engine.loop import EngineLoop, freeze_heap
from engine.model.spec import ModelSpec
from engine.scheduler import Scheduler
from ops.bench.load import Workload
from ops.bench.shapes import SHAPES, write_shape

MIN_GAIN_US = 0.5
"""A step that is faster by less than this keeps the variant before."""
OUTPUT_LEN = 512
MAX_MODEL_LEN = 4096


@dataclass
class Search:
    """Tries variants, reports each, keeps the best.

    measure: microseconds a step, of each round; raises VariantRefusedError. report: (label,
    variant, microseconds of each round). is_over: no time is left.
    """

    measure: Callable[[Variant], list[float]]
    report: Callable[[str, Variant, list[float]], None]
    is_over: Callable[[], bool] = lambda: False
    skipped: list[str] = field(default_factory=list)

    def run(self, base: Variant, all_choices: list[list[Choice]]) -> Variant:
        """The best of the variants; base counts first and last, to show what drifts."""
        best, best_us = base, self._try(BASE, base)
        for choice in all_choices:
            for label, change in choice:
                variant = change(best)
                if variant == best:
                    self._skip(label, "it is the best so far")
                elif self.is_over():
                    self._skip(label, "no time is left")
                else:
                    us = self._try(label, variant)
                    if us < best_us - MIN_GAIN_US:
                        best, best_us = variant, us
        self._try(f"{BASE}_again", base)
        if best != base:
            self._try("best", best)
        return best

    def _try(self, label: str, variant: Variant) -> float:
        try:
            rounds = self.measure(variant)
        except VariantRefusedError as error:
            if label == BASE:
                raise
            self._skip(label, str(error))
            return float("inf")
        self.report(label, variant, rounds)
        return median(rounds)

    def _skip(self, label: str, reason: str) -> None:
        self.skipped.append(label)
        print(f"skipped {label}: {reason}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("model")
    found.add_argument("--rows", type=int, required=True, help="requests that decode at once")
    found.add_argument(
        "--attention",
        type=_argument(attention_tile),
        nargs="+",
        default=[],
        metavar="TOKENS,WARPS,STAGES,PROGRAMS[,tma]",
    )
    found.add_argument(
        "--share", type=_argument(share), nargs="+", default=[], help="per cent, or driver"
    )
    found.add_argument("--small-gemm", action="store_true", help="tiles of the layer's products")
    found.add_argument("--input-len", type=int, default=1024)
    found.add_argument("--seconds", type=float, default=180.0, help="no new variant after these")
    found.add_argument("--out", type=Path, default=Path("results.jsonl"))
    found.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    found.add_argument("--list", action="store_true", help="name the variants and stop")
    return found


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which shows the message of its own error only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def run(
    args: argparse.Namespace,
    config: EngineConfig,
    base: Variant,
    all_choices: list[list[Choice]],
) -> None:
    """Load the engine, search, and append a result for each variant."""
    began = time.monotonic()
    runner = build_runner(config)
    loop = EngineLoop(runner, Scheduler(runner.info, config.enable_prefix_cache))
    load = Workload(args.rows, args.input_len, OUTPUT_LEN, runner.info.vocab_size)
    timer = StepTimer(loop, load)
    freeze_heap()
    results = ResultFile(args.out)

    def report(label: str, variant: Variant, rounds: list[float]) -> None:
        what = f"step_us.{config.model_name}.b{args.rows}.{label}"
        details: dict[str, Any] = {"rounds_us": [round(us, 1) for us in rounds]}
        results.add(what, median(rounds), "us", **details, **variant.as_dict())

    def is_over() -> bool:
        return bool(time.monotonic() - began > args.seconds)

    best = Search(timer.measure, report, is_over).run(base, all_choices)
    print(f"best: {best.as_dict()}")
    loop.drop_runs()
    runner.close()


def checked(args: argparse.Namespace, spec: ModelSpec) -> tuple[Variant, list[list[Choice]]]:
    """What the engine takes by itself, and what to try. Raises ValueError: an option that does not
    go with another, or nothing to try."""
    base = base_variant(spec, graph_size(args.rows))
    tiles = [replace(tile, groups=base.attention.groups) for tile in args.attention]
    found = choices(base, spec, args.rows, tiles, args.share, args.small_gemm)
    if not any(found):
        raise ValueError("nothing to try: give --attention, --share or --small-gemm")
    return base, found


def labels(all_choices: list[list[Choice]]) -> Iterator[str]:
    """Names of all variants."""
    for choice in all_choices:
        yield from (label for label, _ in choice)


def main() -> int:
    """Search in one model."""
    command = parser()
    args = command.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in SHAPES
        path = write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        spec = read_spec(path)
        try:
            base, found = checked(args, spec)
        except ValueError as error:
            command.error(str(error))
        config = EngineConfig(
            model_path=str(path),
            model_name=args.model if is_shape else path.stem,
            device=args.device,
            load_format="dummy" if is_shape else "auto",
            max_model_len=min(MAX_MODEL_LEN, spec.max_model_len),
            enable_prefix_cache=False,
        )
        if args.list:
            print(f"{BASE}: {base.as_dict()}", *labels(found), sep="\n")
            return 0
        if args.device == "cpu" or not torch.cuda.is_available():
            command.error("steps are captured as CUDA graphs, which need a GPU; --list needs none")
        run(args, config, base, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
