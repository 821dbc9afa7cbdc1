"""Sweep of decode attention tiles; fills the tables of kernels/tiles.py.

    python -m bench.sweep_decode [--compile-part I/N] [--seconds S]

Each tile is timed as a decode step launches it, new tokens inside. With --compile-part each
configuration runs once on a tiny batch, so that N processes fill the compile cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

from bench.offline import ready_interpreter
from kernels.tiles import DecodeGroups, DecodeTile
from ops.bench import kernel_cases as cases
from ops.bench import kernel_inputs as inputs

SHORT, LONG = DecodeGroups(2, 4, 8), DecodeGroups(4, 8, 16)
TILES = [
    DecodeTile(64, 4, 3, 2, groups=SHORT, tma=True),
    DecodeTile(64, 4, 4, 2, groups=SHORT),
    DecodeTile(64, 4, 6, 1, groups=SHORT),
    DecodeTile(64, 4, 3, 3, 168, groups=LONG),
    DecodeTile(64, 2, 4, 2, groups=SHORT),
    DecodeTile(64, 4, 2, 4, 128, groups=SHORT),
    DecodeTile(64, 8, 3, 2, groups=SHORT),
    DecodeTile(32, 4, 6, 2, groups=LONG),
    DecodeTile(128, 4, 2, 2, groups=SHORT),
    DecodeTile(128, 4, 1, 3, 168, groups=SHORT),
    DecodeTile(128, 8, 1, 1, groups=SHORT),
    DecodeTile(128, 8, 1, 2, groups=SHORT),
]
NAMES = [
    "16x8.b8.kv1152",
    "32x8.b8.kv1152",
    "32x4.b1.kv1024.warm",
    "16x8.b1.kv1152",
    "16x8.b4.kv1152",
    "16x8.b16.kv1152",
    "32x8.b32.kv4096",
    "32x8.b64.kv1152",
    "32x8.b256.kv1152",
    "9x3.b1.kv1152",
    "9x3.b8.kv1152",
    "9x3.b64.kv1152",
    "9x3.b256.kv1152",
]
"""In this order, so that a sweep that runs out of time has answered what was open."""


def compile_part(part: int, parts: int) -> None:
    """Run every parts-th configuration once on one short row."""
    shapes = [inputs.QWEN3_8B, cases.QWEN3_8B_4KV, inputs.QWEN3_06B, inputs.SMOLLM2]
    jobs = list(itertools.product(shapes, TILES))
    for shape, tile in jobs[part::parts]:
        call = inputs.decode_set([70], shape, 64)
        call.run(*inputs.decode_plan_for(call, tile))


def sweep(
    seconds: float, names: list[str] | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Time each tile on each case; best first within a case."""
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    by_name = {case.name: case for case in cases.DECODE_CASES}
    for case in [by_name[name] for name in names or NAMES]:
        found: list[dict[str, Any]] = []
        for tile in TILES[:limit]:
            if time.monotonic() - began > seconds:
                break
            row = cases.decode_row(case, tile, with_baseline=False)
            found.append({"case": case.name, "us": round(row.timing.p50_us, 2), "tile": str(tile)})
        found.sort(key=lambda record: float(record["us"]))
        results.extend(found)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-part", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--limit", type=int, help="tiles per case")
    args = parser.parse_args()
    if args.compile_part:
        part, parts = args.compile_part.split("/")
        compile_part(int(part), int(parts))
        return
    ready_interpreter()
    for result in sweep(args.seconds, args.names, args.limit):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
