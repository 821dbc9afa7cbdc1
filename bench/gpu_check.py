"""Everything about the kernels that needs a GPU, in one run: tests, tile sweeps, benchmark.

    python -m bench.gpu_check OUT_DIR [--steps tests,sweep,bench] [--seconds S]

Logs and JSON go to OUT_DIR; a compact summary is printed last. Timings are refused when the tests
fail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

COMPILERS = 14
"""Processes that fill Triton's compile cache before a sweep."""


SWEEPS = (
    ("bench.sweep_prefill", ("case",), 3, "20"),
    ("bench.sweep_decode", ("case",), 4, "40"),
    ("bench.sweep_gemm", ("layer", "m"), 2, "60"),
)
"""Module, fields that name a case in its lines, lines printed per case, seconds it may take."""


def run(log: Path, *command: str, limit_s: float = 240.0) -> int:
    """Run a command with its output in a file; returns its exit code, -1 when it ran out of
    time."""
    environment = os.environ | {"PYTHONPATH": ".", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        try:
            return subprocess.run(
                [sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return -1


def compile_all(module: str, out: Path) -> None:
    """Fill the compile cache from several processes."""
    environment = os.environ | {"PYTHONPATH": "."}
    log = (out / f"{module}.compile.log").open("w")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--compile-part", f"{part}/{COMPILERS}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for part in range(COMPILERS)
    ]
    for process in processes:
        process.wait()
    log.close()


def tests(out: Path, patterns: str) -> bool:
    """Kernel tests on the device, in parallel."""
    found = {
        path for pattern in patterns.split(",") for path in Path("tests/kernels").glob(pattern)
    }
    log = out / "tests.log"
    code = run(
        log,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n",
        "14",
        "--tb=short",
        *sorted(str(path) for path in found),
    )
    lines = log.read_text().splitlines()
    for line in [x for x in lines if x.startswith(("FAILED", "ERROR"))][:20] + lines[-1:]:
        print(line[:240])
    return code == 0


def best_of(log: Path, keys: tuple[str, ...], count: int) -> None:
    """Print the best lines per key of a sweep's JSON lines."""
    seen: dict[tuple[object, ...], int] = {}
    for line in log.read_text().splitlines():
        if not line.startswith("{"):
            print(line[:200])
            continue
        record = json.loads(line)
        key = tuple(record[k] for k in keys)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= count:
            print(*key, record["us"], record["tile"])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", default="tests,sweep,bench")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the benchmark")
    parser.add_argument("--sweeps", default="", help="decode, prefill, gemm; default all")
    # Those that need no transformers: penalties are tested with the whole runner, graphs included.
    files = "test_kernels_*.py,test_gpu_penalties.py"
    parser.add_argument("--tests", default=files, help="which files")
    parser.add_argument("--groups", default="")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps = args.steps.split(",")
    began = time.monotonic()
    is_good = True
    if "tests" in steps:
        is_good = tests(args.out, args.tests)
        print(f"[{time.monotonic() - began:.0f} s] tests {'passed' if is_good else 'FAILED'}")
    if "sweep" in steps:
        for module, keys, count, seconds in SWEEPS:
            if args.sweeps and module.removeprefix("bench.sweep_") not in args.sweeps.split(","):
                continue
            compile_all(module, args.out)
            print(f"[{time.monotonic() - began:.0f} s] compiled {module}")
            log = args.out / f"{module}.jsonl"
            run(log, "-m", module, "--seconds", seconds)
            best_of(log, keys, count)
            print(f"[{time.monotonic() - began:.0f} s] {module}")
    if "bench" in steps and is_good:
        log = args.out / "bench.log"
        groups = ["--groups", args.groups] if args.groups else []
        run(log, "-m", "ops.bench.kernels", "--seconds", str(args.seconds), *groups)
        lines = log.read_text().splitlines()
        print("\n".join(line[:160] for line in lines if not line.startswith("{")))
        print(f"[{time.monotonic() - began:.0f} s] bench")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
