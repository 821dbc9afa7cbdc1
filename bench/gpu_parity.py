"""Exactness of the GPU engine: greedy parity on real weights, batch invariance, penalties, long
contexts.

`python -m bench.gpu_parity MODEL.gguf [--fixture F] [--out results.jsonl]`. Prints
one JSON line a check; exit code 1 if a check does not hold. With --device cpu the CPU engine runs
instead, and no logits are compared: to try this file out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import ResultFile
from broker.ring.records import Sampling, Submit
from engine.build import build_runner
from engine.config import EngineConfig
from engine.gpu.runner import GpuRunner
from engine.scheduler import Scheduler
from ops.bench.shapes import SHAPES

Outputs = dict[int, list[int]]
Logits = dict[int, list[torch.Tensor]]


def generate(
    runner: Any, submits: list[Submit], watch: set[int] | None = None
) -> tuple[Outputs, Logits]:
    """Tokens of all runs, one step at a time, and the logits of the watched ones."""
    scheduler = Scheduler(runner.info, enable_prefix_cache=False)
    tokens: Outputs = {submit.rid: [] for submit in submits}
    logits: Logits = {rid: [] for rid in watch or ()}
    for submit in submits:
        reject = scheduler.submit(submit)
        if reject is not None:
            raise ValueError(reject.message)
    while (plan := scheduler.plan()) is not None:
        runner.launch(plan)
        scheduler.launched()
        outcome = scheduler.complete(runner.collect())
        for index, rid in enumerate(outcome.rids.tolist()):
            tokens[rid].append(int(outcome.token_ids[index]))
            if rid in logits and isinstance(runner, GpuRunner):
                logits[rid].append(runner.last_logits(index).clone())
    return tokens, logits


def make_submits(
    prompts: list[list[int]], new_tokens: int, first_rid: int = 1, temperature: float = 0.0
) -> list[Submit]:
    """One run a prompt."""
    none = np.zeros(0, np.int32)
    return [
        Submit(
            first_rid + i,
            np.array(prompt, np.int32),
            none,
            none,
            new_tokens,
            sampling=Sampling(seed=1000 + first_rid + i, temperature=temperature),
        )
        for i, prompt in enumerate(prompts)
    ]


def check_parity(config: EngineConfig, cases: list[Any], num_tokens: int) -> dict[str, Any]:
    """bf16 greedy tokens against float32 ones: equal for 32 tokens, or apart where it is close."""
    prompts = [case["prompt"] for case in cases]
    submits = make_submits(prompts, num_tokens)
    reference, logits = generate(
        _runner(replace(config, dtype="float32")), submits, {s.rid for s in submits}
    )
    exact32 = sum(reference[i + 1] == case["tokens"][:num_tokens] for i, case in enumerate(cases))
    actual, _ = generate(_runner(config), submits)
    equal, gaps = 0, []
    for rid, want in reference.items():
        got = actual[rid]
        apart = next((i for i in range(min(32, num_tokens)) if got[i] != want[i]), None)
        if apart is None:
            equal += 1
            continue
        if not logits[rid]:  # not a GPU runner
            continue
        row = logits[rid][apart].float()
        gaps.append(round(float(row[want[apart]] - row[got[apart]]), 4))
    return {
        "check": "greedy_parity",
        "prompts": len(cases),
        "float32_equal_transformers": exact32,
        "bfloat16_equal": equal,
        "largest_gap_at_a_difference": max(gaps, default=0.0),
        "holds": exact32 >= len(cases) - 1 and max(gaps, default=0.0) <= 0.15,
    }


def check_invariance(config: EngineConfig, num_runs: int = 256) -> dict[str, Any]:
    """One run alone and among 255 others: its logits, bit for bit, and its tokens."""
    runner = _runner(config)
    rng = np.random.default_rng(5)
    lengths = rng.integers(20, 400, num_runs)
    prompts = [rng.integers(0, 40_000, n).tolist() for n in lengths]
    alone, alone_logits = generate(runner, make_submits(prompts[:1], 32), {1})
    among, among_logits = generate(runner, make_submits(prompts, 32), {1})
    same = [
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(alone_logits[1], among_logits[1], strict=True)
    ]
    hot = make_submits(prompts, 32, temperature=0.8)
    seeded_alone, _ = generate(runner, hot[:1])
    seeded_among, _ = generate(runner, hot)
    is_equal = all(same) and alone[1] == among[1] and seeded_alone[1] == seeded_among[1]
    return {
        "check": "batch_invariance",
        "deterministic": config.deterministic,
        "bit_equal_steps": sum(same),
        "steps": len(same),
        "greedy_tokens_equal": alone[1] == among[1],
        "seeded_tokens_equal": seeded_alone[1] == seeded_among[1],
        "holds": is_equal or not config.deterministic,
    }


def check_penalties(config: EngineConfig, num_runs: int = 64) -> dict[str, Any]:
    """Penalised runs beside plain ones, one of them alone, and all of them continued halfway."""
    runner = _runner(config)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 40_000, n).tolist() for n in rng.integers(20, 400, num_runs)]
    settings = Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=2.0)
    plain = make_submits(prompts, 32)
    submits = [s._replace(sampling=settings) if s.rid % 2 else s for s in plain]
    unpenalised, _ = generate(runner, plain)
    among, _ = generate(runner, submits)
    alone, _ = generate(runner, submits[:1])
    half = [s._replace(prefix_ids=np.array(among[s.rid][:16], np.int32)) for s in submits]
    rest, _ = generate(runner, half)
    same = sum(among[rid][16:] == tokens for rid, tokens in rest.items())
    changed = sum(among[rid] != unpenalised[rid] for rid in among if rid % 2)
    spared = sum(among[rid] == unpenalised[rid] for rid in among if rid % 2 == 0)
    is_equal = same == num_runs and spared == num_runs // 2 and alone[1] == among[1]
    return {
        "check": "penalties",
        "deterministic": config.deterministic,
        "runs": num_runs,
        "changed_by_penalties": changed,
        "plain_runs_unchanged": spared,
        "equal_when_continued": same,
        "equal_alone": alone[1] == among[1],
        "holds": changed > 0 and (is_equal or not config.deterministic),
    }


def check_long_context(device: str, num_tokens: int) -> dict[str, Any]:
    """Logits after a long prompt on a tiny model against transformers' SDPA, float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = {k: v for k, v in SHAPES["tiny"].items() if k not in ("architectures", "model_type")}
    model_config = LlamaConfig(**(fields | {"max_position_embeddings": num_tokens + 64}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model = model.to(device).eval()
    prompt = np.random.default_rng(3).integers(0, 512, num_tokens).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = EngineConfig(
            model_path=scratch, device=device, dtype="float32", max_num_seqs=4,  # type: ignore[arg-type]
        )  # fmt: skip
        runner = _runner(config)
        _, logits = generate(runner, make_submits([prompt], 2), {1})
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]).to(device), logits_to_keep=1).logits[0, -1]
    error = float((logits[1][0].float() - expected).abs().max()) if logits[1] else 0.0
    scale = float(expected.abs().max())
    return {
        "check": "long_context",
        "tokens": num_tokens,
        "max_abs_error": error,
        "max_abs_logit": scale,
        "holds": error < 1e-3 * max(scale, 1.0),
    }


def _runner(config: EngineConfig) -> Any:
    return build_runner(config)


RESULTS = {
    "float32_equal_transformers": "parity.float32_equal_transformers",
    "bfloat16_equal": "parity.bfloat16_equal",
    "largest_gap_at_a_difference": "parity.largest_gap_at_a_difference",
    "max_abs_error": "parity.long_context_max_abs_error",
    "bit_equal_steps": "parity.bit_equal_steps",
    "equal_when_continued": "parity.penalties_equal_when_continued",
}
"""Fields of a check that become result lines."""


def report(check: dict[str, Any], results: ResultFile) -> None:
    """A check's numbers as result lines, its other fields beside them."""
    for field, what in RESULTS.items():
        if field in check:
            mode = "deterministic." if check.get("deterministic") else ""
            others = {key: value for key, value in check.items() if key != field}
            results.add(what.replace("parity.", f"parity.{mode}"), check[field], "1", **others)


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--fixture", type=Path, default=Path("tests/integration/data/smollm2_greedy.json")
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=256)
    parser.add_argument("--long", type=int, default=32_000, help="tokens of the long context")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    config = EngineConfig(
        model_path=str(args.model), device=args.device, max_model_len=4096,
        kv_cache_bytes=8 << 30 if on_gpu else 0, max_num_seqs=256 if on_gpu else 0,
    )  # fmt: skip
    cases = json.loads(args.fixture.read_text())[: args.prompts]
    failed = False
    checks: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: check_long_context(args.device, args.long),
        lambda: check_parity(config, cases, args.tokens),
        lambda: check_invariance(replace(config, deterministic=on_gpu), args.runs),
        lambda: check_invariance(config, args.runs),
        lambda: check_penalties(replace(config, deterministic=on_gpu), min(args.runs, 64)),
    )
    for check in checks:
        result = check()
        torch.cuda.empty_cache()
        failed = failed or not result["holds"]
        print(json.dumps(result), flush=True)
        if args.out is not None:
            report(result, ResultFile(args.out))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
