"""SmolLM2 on the CPU, side by side: this engine (8-bit products, packed, float32), transformers,
llama-cpp-python.

    python -m ops.bench.engine_cpu [--llama-python PATH] [--batches 1 8 16] [--repeats 3]

All run the same weights, the same random prompts and the same number of threads, one after another
in their own processes, round by round, so that a busy moment of the machine hits all alike. Decode
is measured from the moment all prompts are computed; the best round counts. Greedy, no end of
sequence. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.threads import set_thread_waiting
from ops.models import resolve

if TYPE_CHECKING:
    from engine.plan import Runner
    from engine.scheduler import Scheduler

_ROOT = Path(__file__).resolve().parents[2]
_RIVAL = Path(__file__).with_name("llama_cpp_rival.py")
_OURS = {"ours": "auto", "ours_packed": "packed", "ours_float32": "none"}


def run_ours(job: dict[str, Any], quantization: str) -> dict[str, float]:
    """Scheduler and runner without rings: prefill seconds, decode seconds, host time per step."""
    from engine.build import build_runner
    from engine.config import EngineConfig
    from engine.scheduler import Scheduler

    config = EngineConfig(
        model_path=job["model"],
        device="cpu",
        quantization=quantization,  # type: ignore[arg-type]
        num_threads=job["threads"],
        kv_cache_bytes=600 << 20,
    )
    runner = build_runner(config)
    while runner.prepare():
        pass  # what an engine does while it waits for its first job
    passes = []
    for _ in range(job["repeats"]):
        scheduler = Scheduler(runner.info, enable_prefix_cache=False)
        passes.append(_run_once(runner, scheduler, job))
    return min(passes, key=lambda times: times["decode_s"])


def _run_once(runner: Runner, scheduler: Scheduler, job: dict[str, Any]) -> dict[str, float]:
    import numpy as np

    from broker.ring.records import Submit

    none = np.zeros(0, np.int32)
    for rid, prompt in enumerate(job["prompts"], start=1):
        ids = np.array(prompt, np.int32)
        scheduler.submit(Submit(rid, ids, none, none, job["new_tokens"]))
    waiting, steps, model_s = len(job["prompts"]), 0, 0.0
    started = prefilled = time.perf_counter()
    while (plan := scheduler.plan()) is not None:
        launched = time.perf_counter()
        runner.launch(plan)
        result = runner.collect()
        collected = time.perf_counter()
        scheduler.launched()
        outcome = scheduler.complete(result)
        if waiting:
            waiting -= len(outcome.started_rids)
            prefilled = time.perf_counter()
        else:
            steps += 1
            model_s += collected - launched
    decode_s = time.perf_counter() - prefilled
    return {
        "prefill_s": prefilled - started,
        "decode_s": decode_s,
        "host_us_per_step": (decode_s - model_s) / max(steps, 1) * 1e6,
    }


def run_transformers(job: dict[str, Any]) -> dict[str, float]:
    """`generate` on the dequantized float32 weights; decode = whole run - run of one token."""
    import torch

    from tests.integration.data.make_smollm2_greedy import load_reference

    torch.set_num_threads(job["threads"])
    model = load_reference(Path(job["model"]))
    ids = torch.tensor(job["prompts"])
    best = {"prefill_s": float("inf"), "decode_s": float("inf")}
    for _ in range(job["repeats"]):
        times = []
        for new_tokens in (1, job["new_tokens"]):
            started = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            times.append(time.perf_counter() - started)
        if times[1] - times[0] < best["decode_s"]:
            best = {"prefill_s": times[0], "decode_s": times[1] - times[0]}
    return best


def measure(system: str, job: dict[str, Any], llama_python: str) -> dict[str, float]:
    """Run one system on one job in a process of its own."""
    command = [sys.executable, "-m", "ops.bench.engine_cpu", "--system", system]
    if system == "llama_cpp":
        command = [llama_python, str(_RIVAL)]
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT}/clients/python"}
    done = subprocess.run(
        command,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
        cwd=_ROOT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{system} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(args: argparse.Namespace) -> dict[str, float]:
    """All systems on all batch sizes; prints a table and returns the named numbers."""
    systems = [*_OURS, "transformers"] + (["llama_cpp"] if args.llama_python else [])
    numbers: dict[str, float] = {}
    chooser = random.Random(0)
    for batch in args.batches:
        prompts = [
            [chooser.randrange(1000, 40000) for _ in range(args.prompt_tokens)]
            for _ in range(batch)
        ]
        job = {
            "model": str(args.model),
            "prompts": prompts,
            "new_tokens": args.new_tokens,
            "threads": args.threads,
            "repeats": 2,
        }
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.repeats):
            for system in systems:
                result = measure(system, job, args.llama_python)
                if system not in best or result["decode_s"] < best[system]["decode_s"]:
                    best[system] = result
        name = f"cpu.smollm2.b{batch}"
        decoded = batch * (args.new_tokens - 1)
        for system, result in best.items():
            tok_s = decoded / result["decode_s"]
            numbers[f"{name}.{system}.decode_tok_s"] = round(tok_s, 1)
            prefill_tok_s = batch * args.prompt_tokens / result["prefill_s"]
            numbers[f"{name}.{system}.prefill_tok_s"] = round(prefill_tok_s, 1)
            print(
                f"{batch:>3} at once  {system:<13} {tok_s:8.1f} tok/s decode  "
                f"{prefill_tok_s:8.1f} tok/s prompt",
                flush=True,
            )
        ours_s = best["ours"]["decode_s"]
        numbers[f"{name}.host_us_per_step"] = round(best["ours"]["host_us_per_step"], 1)
        for rival in systems[len(_OURS) :]:
            numbers[f"{name}.vs_{rival}"] = round(best[rival]["decode_s"] / ours_s, 2)
    return numbers


def main() -> None:
    """Parse arguments; measure everything, or (internally) one system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: smollm2-135m")
    parser.add_argument("--llama-python", default="", help="interpreter with llama-cpp-python")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--system", choices=[*_OURS, "transformers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system:
        job = json.load(sys.stdin)
        is_ours = args.system in _OURS
        if is_ours:
            set_thread_waiting()
        result = run_ours(job, _OURS[args.system]) if is_ours else run_transformers(job)
        print(json.dumps(result))
        return
    if args.model is None:
        args.model = Path(resolve("smollm2-135m").path)
    numbers = compare(args)
    facts = {"machine": platform.processor() or platform.machine(), "threads": args.threads}
    print(json.dumps({**facts, **numbers}))


if __name__ == "__main__":
    main()
