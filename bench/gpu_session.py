"""Everything that wants a GPU, in one command: tests, sweeps, exactness, speed, rivals.

    python -m bench.gpu_session OUT --limit-s 580 [--parts compile,tests,...] [--model MODEL.gguf]
    python -m bench.gpu_session OUT --device cpu       # the same code on tiny shapes: a dry run

Each part is a process of its own with a time limit; one that fails costs only itself. Results are
appended to OUT/results.jsonl (bench/report.py says how a line looks), output to OUT/session.log.
What found no time is named at the end, as the --parts of the next command.

Order of work on a machine that is there for half an hour, most wanted first:

1. `--parts compile,tests,kernels,smollm2-135m,qwen3-0.6b,qwen3-8b,deterministic`: tests before
   numbers. One row of a wide model and 256 rows are bound by the card's power as much as by bytes:
   look at its clock and power beside them before a change of a few per cent is believed.
2. With --model: parity and worker, which need real weights (which may come in pieces:
   --model-pieces). Then load and rival.
3. Extra parts run only where named: sweep_gemm, sweep_prefill, power, step_search. What sweep_fixed
   writes, OUT/fixed_gemm_tiles.json, goes over kernels/fixed_gemm_tiles.json.
4. Look at gpu_active_pct's kernels and at the trace, change one thing, and measure that shape again
   with `python -m bench.gpu_engine SHAPE`. A kernel that is faster alone can make a step slower: it
   shares processors, memory and power with its neighbours.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_parts import Part, Setting, all_parts
from bench.report import BATCHES, ResultFile

KILL_AFTER_S = 5.0
TAIL_LINES = 24
_VERDICT = re.compile(r"^(FAILED|ERROR|E  )| passed| failed|Error|\"do_not_fit\"|other bits")


class Session:
    """Runs parts while there is time."""

    def __init__(self, setting: Setting, limit_s: float) -> None:
        self._setting = setting
        self._end = time.monotonic() + limit_s
        self._log = (setting.out / "session.log").open("ab")
        environment = {"PYTHONUNBUFFERED": "1"}
        paths = [".", "clients/python", os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)}

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def run(self, part: Part) -> str:
        """Run one part; returns `passed`, `FAILED`, `OUT OF TIME` or `not run`."""
        left = self._end - time.monotonic()
        if left < min(20.0, part.limit_s):
            return "not run"
        end = time.monotonic() + min(left, part.limit_s)
        groups = [part.commands] if part.at_once else [[command] for command in part.commands]
        codes = [code for group in groups for code in self._together(part, group, end)]
        if all(code == 0 for code in codes):
            return "passed"
        return "OUT OF TIME" if None in codes else "FAILED"

    def _together(self, part: Part, commands: Sequence[list[str]], end: float) -> list[int | None]:
        """Exit codes of commands that run at the same time; None for one that was stopped."""
        environment = dict(self._environment)
        if self._setting.is_dry and part.interprets:
            environment["TRITON_INTERPRET"] = "1"
        self._log.write(f"\n== {part.name}: {commands}\n".encode())
        self._log.flush()
        begin = self._log.tell()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=self._log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        codes = [_wait(process, end) for process in processes]
        with (self._setting.out / "session.log").open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").splitlines()
        if len(commands) > 1:  # their lines are mixed: show those that say how it went
            lines = [line for line in lines if _VERDICT.search(line)]
        print("\n".join(line[:200] for line in lines[-TAIL_LINES:]), flush=True)
        return codes


def _wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    """The exit code, or None: it ran out of time, and it and its children were stopped."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def add_deterministic_cost(results: ResultFile) -> None:
    """What the deterministic mode costs, by batch; the worst is the headline."""
    values = results.latest()
    costs = {}
    for batch in BATCHES:
        plain = values.get(f"qwen3-8b.decode_tok_s.b{batch}")
        exact = values.get(f"qwen3-8b.deterministic.decode_tok_s.b{batch}")
        if plain and exact:
            costs[batch] = 100.0 * (plain / exact - 1.0)
            results.add(f"deterministic_cost_pct.b{batch}", costs[batch], "%")
    if costs:
        worst = max(costs, key=lambda batch: costs[batch])
        results.add("deterministic_cost_pct", costs[worst], "%", rows=worst)


def joined(model: Path | None, pieces: list[Path]) -> Path | None:
    """The model file, put together from pieces if it came in some."""
    has_all = bool(pieces) and all(piece.exists() for piece in pieces)
    if has_all and model is not None and not model.exists():
        with model.open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
    return model if model is not None and model.exists() else None


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, default=580.0)
    parser.add_argument("--parts", default="", help="names, in any order; default: all")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, help="real SmolLM2 weights")
    parser.add_argument("--model-pieces", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.out, args.device, joined(args.model, args.model_pieces))
    parts = all_parts(setting)
    wanted = set(filter(None, args.parts.split(",")))
    unknown = wanted - {part.name for part in parts} - {"parity", "worker"}
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {[p.name for p in parts]}")
    session = Session(setting, args.limit_s)
    states = {}
    for part in parts:
        is_wanted = part.name.removesuffix("_compile") in wanted if wanted else not part.is_extra
        if not is_wanted:
            continue
        began = time.monotonic()
        print(f"=== {part.name}", flush=True)
        states[part.name] = session.run(part)
        print(
            f"=== {part.name}: {states[part.name]} in {time.monotonic() - began:.0f} s", flush=True
        )
        if part.name == "deterministic":
            add_deterministic_cost(ResultFile(setting.results))
    session.close()
    print("; ".join(f"{name} {state}" for name, state in states.items()))
    left = [name for name, state in states.items() if state in ("not run", "OUT OF TIME")]
    if left:
        print(f"next: --parts {','.join(left)}")
    return int(any(state != "passed" for state in states.values()))


if __name__ == "__main__":
    sys.exit(main())
