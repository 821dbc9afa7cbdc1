"""Sweep of prompt attention tiles; fills _PREFILL_TILES of kernels/tiles.py.

python -m bench.sweep_prefill [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import time

from triton.runtime.errors import OutOfResources

from kernels.tiles import PrefillTile
from ops.bench import kernel_cases as cases
from ops.bench import kernel_inputs as inputs

TILES = [
    PrefillTile(128, 64, 4, 2),
    PrefillTile(128, 64, 4, 2, tma=True),
    PrefillTile(128, 64, 4, 3, tma=True),
    PrefillTile(128, 64, 8, 3),
    PrefillTile(128, 64, 8, 2, tma=True),
    PrefillTile(128, 64, 8, 3, tma=True),
    PrefillTile(128, 64, 8, 4, tma=True),
    PrefillTile(64, 64, 4, 2, tma=True),
    PrefillTile(64, 64, 4, 3, tma=True),
    PrefillTile(128, 32, 4, 3, tma=True),
    PrefillTile(256, 64, 8, 3, tma=True),
]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-part", default="0/1")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    part, parts = (int(x) for x in args.compile_part.split("/"))
    began = time.monotonic()
    for shape in (inputs.QWEN3_8B, inputs.SMOLLM2):
        found = []
        for tile in TILES[part::parts]:
            if time.monotonic() - began > args.seconds:
                break
            try:
                row = cases.prefill_row([1024] * 8, shape, tile)
            except OutOfResources:
                continue
            us = round(row.timing.p50_us, 1)
            record = {"case": row.name, "us": us, "tile": str(tile)}
            found.append((us, record | {"sdpa_us": round(row.baseline_us, 1)}))
        for _, record in sorted(found, key=lambda pair: pair[0]):
            print(json.dumps(record))


if __name__ == "__main__":
    main()
