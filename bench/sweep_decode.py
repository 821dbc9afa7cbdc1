"""Sweep of decode attention tiles; fills _DECODE_TILES of kernels/tiles.py.

    python -m bench.sweep_decode [--compile-part I/N] [--seconds S]

With --compile-part each configuration runs once on a tiny batch, so that N processes fill the
compile cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

from kernels.tiles import DecodeTile
from ops.bench import kernel_cases as cases
from ops.bench import kernel_inputs as inputs

TILES = [
    DecodeTile(64, 2, 2, 4),
    DecodeTile(64, 4, 2, 3),
    DecodeTile(64, 4, 2, 4, 128),
    DecodeTile(64, 4, 3, 3, 168),
    DecodeTile(128, 4, 2, 2),
    DecodeTile(128, 4, 2, 3, 168),
]
NAMES = [
    "32x8.b32.kv4096",
    "32x4.b1.kv1024.warm",
    "32x8.b64.kv1152",
    "32x8.b256.kv1152",
    "16x8.b1.kv1152",
    "16x8.b8.kv1152",
    "9x3.b1.kv1152",
    "9x3.b256.kv1152",
]


def compile_part(part: int, parts: int) -> None:
    """Run every parts-th configuration once on one short row."""
    shapes = [(32, 8, 128), (32, 4, 128), (16, 8, 128), (9, 3, 64)]
    jobs = list(itertools.product(shapes, TILES))
    for (q_heads, kv_heads, head_dim), tile in jobs[part::parts]:
        call = inputs.decode_set([70], q_heads, kv_heads, head_dim, 64)
        call.run(*inputs.decode_plan_for(call, tile), tile)


def sweep(seconds: float) -> list[dict[str, float | str]]:
    """Time each tile on each case; best first within a case."""
    began = time.monotonic()
    results: list[dict[str, float | str]] = []
    for case in cases.DECODE_CASES:
        if case[0] not in NAMES:
            continue
        found = []
        for tile in TILES:
            if time.monotonic() - began > seconds:
                break
            row = cases.decode_rows(*case, tile=tile, with_baseline=False)
            found.append({"case": case[0], "us": round(row.timing.p50_us, 2), "tile": str(tile)})
        found.sort(key=lambda r: r["us"])
        results.extend(found)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-part", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    if args.compile_part:
        part, parts = args.compile_part.split("/")
        compile_part(int(part), int(parts))
        return
    for result in sweep(args.seconds):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
