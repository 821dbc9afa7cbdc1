"""`tokenbus bench kernels`: microseconds of every kernel on real shapes, its floor, and torch
beside it.

Needs a CUDA device. Prints a table, then one JSON line. Timing: ops/bench/kernel_timing.py;
cases: kernel_cases.py, product_cases.py. Decode attention is launched as a decode step launches
it: with the tile of the model's size, from rows as they come from the projection, turning queries
and keys itself and keeping the new keys and values (but for the lines `turned_before`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import torch

NO_DEVICE_EXIT = 3
"""Exit code when there is no CUDA device to measure."""


def rows_of(groups: set[str]) -> Iterator[object]:
    """Rows of these groups, measured one by one."""
    from ops.bench import kernel_cases as cases
    from ops.bench import kernel_inputs as inputs
    from ops.bench import product_cases as products

    if "decode" in groups:
        for case in cases.DECODE_CASES:
            yield cases.decode_row(case)
    if "prefill" in groups:
        for lengths in ([1024], [1024] * 8, [8192]):
            yield cases.prefill_row(lengths, inputs.QWEN3_8B)
        yield cases.prefill_row([1024] * 8, inputs.SMOLLM2)
    if "chain" in groups:
        for shape, layers in ((inputs.QWEN3_06B, 28), (inputs.SMOLLM2, 30), (inputs.QWEN3_8B, 12)):
            for m in (1, 8, 32, 64):
                yield products.chain_row(shape, m, layers)
    if "linear" in groups:
        for shape in (inputs.QWEN3_06B, inputs.QWEN3_8B, inputs.SMOLLM2):
            for m in (1, 8, 64):
                yield from products.linear_rows(shape, m)
    if "fixed" in groups:
        for m in (1, 64, 256, 2048):
            yield from products.fixed_rows(m)
    if "small" in groups:
        for m in (1, 256):
            yield from cases.small_kernel_rows(inputs.QWEN3_8B, m)
        for kind in ("greedy", "random", "filters", "penalties"):
            for m in (1, 64, 256):
                yield cases.sampler_row(m, 151936, kind)


GROUPS = ("decode", "prefill", "chain", "linear", "fixed", "small")


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and, last, one JSON line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="tokenbus bench kernels", description=__doc__)
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated: %(default)s")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after this")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench kernels needs a CUDA device", file=sys.stderr)
        return NO_DEVICE_EXIT
    from ops.bench.kernel_timing import Row, format_table

    began = time.monotonic()
    rows = []
    for row in rows_of(set(args.groups.split(","))):
        if isinstance(row, Row):
            rows.append(row)
        if time.monotonic() - began > args.seconds:
            break
    print(format_table(rows))
    document = {
        "bench": "kernels",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [row.as_dict() for row in rows],
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
