"""Kernel times as result lines: decode attention of the two shapes that have targets, and the rest.

python -m bench.gpu_kernels --out results.jsonl [--groups decode,fixed] [--seconds S] [--tiny]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from bench.offline import ready_interpreter
from bench.report import ResultFile
from ops.bench import kernel_cases as cases
from ops.bench.kernel_inputs import ModelShape
from ops.bench.kernel_timing import Row
from ops.bench.kernels import GROUPS, rows_of

NAMES = {
    "decode.32x8.b32.kv4096": "attn_decode_us.32x8.b32.kv4096",
    "decode.32x4.b1.kv1024.warm": "attn_decode_us.32x4.b1.kv1024",
}
TINY = ModelShape("tiny", 64, 64, 4, 2, 16, 1, 512, head_norms=True)
TINY_CASES = [
    cases.DecodeCase("32x8.b32.kv4096", [40] * 2, TINY),
    cases.DecodeCase("32x4.b1.kv1024.warm", [70], replace(TINY, num_kv_heads=1), True),
]


def main() -> int:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--groups", default="decode,fixed,chain,prefill,small")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true", help="two small cases, to try this out")
    args = parser.parse_args()
    results = ResultFile(args.out)
    began = time.monotonic()
    groups = [group for group in GROUPS if group in args.groups.split(",")]
    found: Iterable[object] = rows_of(set(groups))
    if args.tiny:
        ready_interpreter()
        found = (cases.decode_row(case) for case in TINY_CASES)
    for row in found:
        if isinstance(row, Row):
            details = row.as_dict()
            what = NAMES.get(row.name, f"kernel_us.{row.name}")
            results.add(what, row.timing.p50_us, "us", row.floor_us, **_kept(details))
        if time.monotonic() - began > args.seconds:
            break
    return 0


def _kept(details: dict[str, float | str]) -> dict[str, float | str]:
    """What a row says beside its median and floor; of decode attention, what is inside."""
    kept = ("p20_us", "p80_us", "gb_s", "baseline", "baseline_us", "note")
    return {key: details[key] for key in kept if key in details}


if __name__ == "__main__":
    sys.exit(main())
