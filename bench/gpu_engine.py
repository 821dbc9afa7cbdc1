"""Engine measurements on one GPU: each model shape in a process of its own, one JSON file out.

`python bench/gpu_engine.py OUT_DIR [--models qwen3-0.6b ...] [--quick]`. Each run is limited in
time: one that hangs costs only itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FULL = {
    "qwen3-0.6b": ["1:1024:256", "8:1024:256", "64:1024:256", "256:1024:256"],
    "smollm2-135m": ["1:1024:256", "8:1024:256", "64:1024:256", "256:1024:256"],
    "qwen3-8b": ["1:1024:256", "8:1024:256", "64:1024:256", "256:1024:256"],
}
QUICK = {model: ["1:1024:64", "8:1024:64", "64:1024:32"] for model in FULL}


def main() -> int:
    """Run the models and write OUT_DIR/engine.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(FULL))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for model in args.models:
        cases = args.cases or (QUICK if args.quick else FULL)[model]
        command = [sys.executable, "-m", "ops.bench.engine", "--model", model, "--case", *cases]
        command += ["--max-model-len", "4096", *args.extra]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{model}: over {args.limit_s} s", flush=True)
            failed += 1
            continue
        if done.returncode:
            failed += 1
            continue
        line = done.stdout.strip().splitlines()[-1]
        report = json.loads(line)
        print(
            model,
            "ready",
            report["ready_s"],
            "first token",
            report["first_token_s"],
            "graphs",
            report["prepare_s"],
            flush=True,
        )
        with (args.out / "engine.jsonl").open("a") as file:
            file.write(line + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
