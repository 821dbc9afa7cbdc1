"""transformers' continuous batching (`generate_batch`) on the shapes and batches of gpu_engine.

    python -m bench.gpu_rival SHAPE --out results.jsonl [--batches 8 64] [--device cpu]

Random weights, random prompts, greedy, nothing ends early, as with ours. Rates come from the times
at which each request's tokens came.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import ResultFile
from ops.bench.shapes import SHAPES


def build_model(shape: str, device: str) -> Any:
    """The shape with random weights, in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "model_type")}
    config = AutoConfig.for_model(SHAPES[shape]["model_type"], **fields)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def options(batch: int, tokens_each: int, max_batch_tokens: int) -> dict[str, Any]:
    """Sizes of its cache and steps, as far as the installed version can be told them."""
    import transformers

    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None:
        return {}
    page_size = 256
    wanted = {
        "page_size": page_size,
        "num_blocks": batch * -(-tokens_each // page_size) + 8,
        "max_batch_tokens": max_batch_tokens,
    }
    known = {field.name for field in dataclasses.fields(kind)}
    config = kind(**{name: value for name, value in wanted.items() if name in known})
    return {"continuous_batching_config": config}


def measure(
    model: Any, batch: int, input_len: int, output_len: int, max_batch_tokens: int = 8192
) -> dict[str, float]:
    """Tokens a second of one batch: while all decode, and of the whole run (set-up included)."""
    from transformers import GenerationConfig

    vocab_size = model.config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, input_len).tolist() for _ in range(batch)]
    config = GenerationConfig(
        max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    began = time.perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        record_timestamps=True,
        **options(batch, input_len + output_len, max_batch_tokens),
    )
    total_s = time.perf_counter() - began
    lengths = [len(output.generated_tokens) for output in outputs.values()]
    if len(lengths) != batch or set(lengths) != {output_len}:
        raise RuntimeError(f"{batch} x {output_len} tokens were asked for, {lengths} came")
    stamps = [sorted(output.timestamps or []) for output in outputs.values()]
    first = max((s[0] for s in stamps if s), default=0.0)
    last = min((s[-1] for s in stamps if s), default=0.0)
    between = sum(1 for s in stamps for t in s if first < t <= last)
    result = {"total_s": total_s, "tok_s": sum(lengths) / total_s}
    return result | {"decode_tok_s": between / (last - first) if last > first else 0.0}


def main() -> int:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    import transformers

    results = ResultFile(args.out)
    model = build_model(args.shape, args.device)
    for batch in args.batches:
        most = 8192 if args.device == "cuda" else 128
        measure(model, batch, args.input_len, 4, most)  # warm
        found = measure(model, batch, args.input_len, args.output_len, most)
        results.add(
            f"{args.shape}.generate_batch.decode_tok_s.b{batch}", found["decode_tok_s"], "tok/s",
            transformers=transformers.__version__, attention="sdpa", weights="random",
            **{key: round(value, 3) for key, value in found.items()},
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
