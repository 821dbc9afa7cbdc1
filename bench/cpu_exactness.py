"""What the CPU engine's fast products cost in exactness, beside llama.cpp, on text.

    python -m bench.cpu_exactness [--windows 6] [--llama-python PYTHON]

Windows of 256 tokens of the file LICENSE go through SmolLM2 (Q4_1) as prompts. The reference is
this engine with the checkpoint's numbers expanded to float32. For each way: perplexity, the share
of positions whose best token is the reference's, and the mean divergence KL(reference | way) of the
next token's distribution. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy, log_softmax

from broker.ring.records import Sampling
from broker.text.model import load_text_model
from engine.config import EngineConfig
from engine.cpu.build import build_cpu_runner
from engine.cpu.step_inputs import build_step_inputs
from engine.cpu.tables import RowTables
from engine.plan import IntArray, NewRow, StepPlan
from ops.models import resolve

_WINDOW = 256
_BLOCK = 16
_LLAMA = """
import sys, numpy as np
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_ctx=512, logits_all=True, verbose=False)
logits = []
for window in np.load(sys.argv[2]):
    llama.reset()
    llama.eval(window.tolist())
    logits.append(np.array(llama.scores)[: len(window)].copy())
np.save(sys.argv[3], np.concatenate(logits))
"""


def our_logits(
    model: str, windows: IntArray, quantization: Literal["auto", "packed", "none"]
) -> tuple[str, torch.Tensor]:
    """How products were computed, and logits of every position, float32 [windows * 256, V]."""
    config = EngineConfig(
        model_path=model, max_model_len=2 * _WINDOW, quantization=quantization, device="cpu"
    )
    runner = build_cpu_runner(config, lambda _: None)
    parts = []
    with torch.inference_mode():
        for window in windows:
            parts.append(_window_logits(runner.model, window))
    return runner.info.quantization, torch.cat(parts)


def _window_logits(model: Any, window: IntArray) -> torch.Tensor:
    columns = np.arange(_WINDOW // _BLOCK, dtype=np.int32)
    none = np.zeros(0, np.int32)
    plan = StepPlan(
        step_id=1,
        new_rows=(NewRow(0, window, _WINDOW, Sampling(), none, 0),),
        block_rows=np.zeros_like(columns),
        block_cols=columns,
        block_ids=columns,
        rows=np.zeros(1, np.int32),
        num_computed=np.zeros(1, np.int32),
        num_new=np.array([_WINDOW], np.int32),
        sample=np.ones(1, np.bool_),
        num_decode=0,
    )
    tables = RowTables(1, 2 * _WINDOW, _BLOCK, model.cache.pad_block)
    tables.apply(plan)
    windows = tuple(sorted(set(model.spec.windows)))
    step = build_step_inputs(plan, tables, model.cache, windows, model.spec.num_kv_heads)
    step = replace(step, sample_tokens=torch.arange(_WINDOW))
    logits: torch.Tensor = model.head(model.decoder.forward(model.embedding(step.token_ids), step))
    return logits


def llama_logits(python: str, model: str, windows: IntArray) -> torch.Tensor:
    """The same of llama-cpp-python, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        given, taken = Path(directory, "windows.npy"), Path(directory, "logits.npy")
        np.save(given, windows)
        subprocess.run([python, "-c", _LLAMA, model, str(given), str(taken)], check=True)
        return torch.from_numpy(np.load(taken))


def compare(reference: torch.Tensor, logits: torch.Tensor, windows: IntArray) -> dict[str, float]:
    """The figures of one way. float32 [P, V] twice, token ids int32 [windows, 256]."""
    following = torch.from_numpy(np.roll(windows, -1, axis=1).reshape(-1).astype(np.int64))
    has_following = torch.ones(len(following), dtype=torch.bool)
    has_following[_WINDOW - 1 :: _WINDOW] = False
    ours, theirs = log_softmax(logits, 1), log_softmax(reference, 1)
    divergence = (theirs.exp() * (theirs - ours)).sum(1)
    loss = cross_entropy(logits[has_following], following[has_following])
    return {
        "perplexity": round(float(loss.exp()), 3),
        "same_best_token": round(
            float((logits.argmax(1) == reference.argmax(1)).float().mean()), 4
        ),
        "mean_kl": round(float(divergence.mean()), 5),
        "p99_kl": round(float(divergence.quantile(0.99)), 4),
    }


def main() -> None:
    """Compute and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--llama-python", default="")
    args = parser.parse_args()
    model = str(resolve("smollm2-135m").path)
    text = Path("LICENSE").read_text(encoding="utf-8")
    ids = load_text_model(model).encoder.encode(text, add_special_tokens=False)
    count = min(args.windows, len(ids) // _WINDOW)
    windows = ids[: count * _WINDOW].reshape(count, _WINDOW)
    _, reference = our_logits(model, windows, "none")
    results = {"float32": compare(reference, reference, windows)}
    for quantization in ("auto", "packed"):
        scheme, logits = our_logits(model, windows, quantization)
        results[scheme] = compare(reference, logits, windows)
    if args.llama_python:
        logits = llama_logits(args.llama_python, model, windows)
        results["llama.cpp"] = compare(reference, logits, windows)
    for way, figures in results.items():
        print(way, figures)
    print(json.dumps({"bench": "cpu_exactness", "positions": windows.size, **results}))


if __name__ == "__main__":
    main()
