"""transformers' continuous batching (`generate_batch`) on the shapes and batches of gpu_engine.

    python -m bench.gpu_rival SHAPE --out results.jsonl [--batches 8 64] [--device cpu]
                              [--settings sdpa sdpa+graphs eager eager+graphs flash_attention_2]

Random weights, random prompts, greedy, nothing ends early, as with ours. It is given its best case:
each setting runs once to warm (its cache is built, its graphs are captured) and once for the
figures, and each result line is the figure of the setting that did best.

- `run_tok_s`: all output tokens over the time from the first request's creation to the last token,
  prompts included, set-up excluded: the span its own benchmark takes.
- `decode_tok_s`: the rate from when every request has its first token to the end of the step in
  which the first request ended. No such window, no line.
- `total_s`: the measured call with what building manager and cache took before it (`setup_s`).

Its documentation asks for the flash-attn package: where that is installed it is the only default
setting. Without it, a step attends all requests as one sequence under a dense mask.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import ResultFile
from ops.bench.shapes import SHAPES

PAGE_SIZE = 256
WARM_TOKENS = 4
# A step's tokens: its own default, and fewer where the scores of all of them are held at once.
STEP_TOKENS = {"sdpa": 8192, "eager": 2048, "flash_attention_2": 8192}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How transformers is run: its attention, and whether steps are captured as CUDA graphs."""

    attention: str
    graphs: bool

    def __str__(self) -> str:
        return self.attention + ("+graphs" if self.graphs else "")


@dataclasses.dataclass(frozen=True)
class Work:
    """One batch of requests, in requests and tokens."""

    batch: int
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """One measured run; decode_tok_s is None where not all requests ever decoded at once."""

    decode_tok_s: float | None
    run_tok_s: float
    run_s: float
    setup_s: float = 0.0
    total_s: float = 0.0


def parse_setting(text: str) -> Setting:
    """`ATTENTION` or `ATTENTION+graphs`; raises argparse.ArgumentTypeError."""
    for setting in (
        Setting(attention, graphs) for attention in STEP_TOKENS for graphs in (False, True)
    ):
        if str(setting) == text:
            return setting
    raise argparse.ArgumentTypeError(
        f"setting {text!r}: take one of {', '.join(STEP_TOKENS)}, or one of them with +graphs"
    )


def default_settings(device: str) -> list[Setting]:
    """What is worth a try with what is installed."""
    from transformers.utils import is_flash_attn_2_available

    if device == "cpu":
        return [Setting("sdpa", False)]
    if is_flash_attn_2_available():
        return [Setting("flash_attention_2", True)]
    return [Setting("sdpa", False), Setting("sdpa", True), Setting("eager", True)]


def config_fields(setting: Setting, work: Work) -> dict[str, Any]:
    """What its configuration should say, under the names of all versions."""
    # Its admission holds prompts back when less than safety_margin of all pages is free, so the
    # cache is roomy and the margin off. It may ask for one page more than a request fills.
    tokens_each = work.input_len + work.output_len
    pages_each = -(-tokens_each // PAGE_SIZE) + 1
    prompts = work.batch * work.input_len
    fields: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "block_size": PAGE_SIZE,  # page_size before 5.18, deprecated beside it
        "num_blocks": work.batch * pages_each + 8,
        "max_batch_tokens": min(STEP_TOKENS[setting.attention], max(work.batch, prompts, 64)),
        "max_requests_per_batch": work.batch,
        "safety_margin": 0.0,
        # The second run has the first one's prompts: shared pages would spare it the prompts.
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
        "use_cuda_graph": setting.graphs,
    }
    if setting.attention != "flash_attention_2":
        # Its default of 16384 doubles the keys of 8 x 1024 tokens; this makes one or two graphs of
        # all decode steps. Asynchronous steps would copy the whole mask from the host each time.
        fields["kv_padding_interval_size"] = (
            1 << max(8, (work.batch * work.output_len - 1).bit_length()) if setting.graphs else 0
        )
        fields["use_async_batching"] = False
    return fields


def known_fields(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Those fields that the installed version's configuration has; block_size only if it is new."""
    known = {field.name for field in dataclasses.fields(kind)}
    if "page_size" in known:
        known.discard("block_size")
    return {name: value for name, value in fields.items() if name in known}


def figures(created: Sequence[float], stamps: Sequence[Sequence[float]]) -> Figures:
    """Rates of one run.

    Args:
        created: when each request was created, in seconds.
        stamps: per request, when each of its tokens came, ascending, same clock; none is empty.
    """
    run_s = max(times[-1] for times in stamps) - min(created)
    tokens = sum(map(len, stamps))
    start = max(times[0] for times in stamps)
    first_end = min(times[-1] for times in stamps)
    decode_tok_s = None
    if first_end > start:
        # Tokens of one step get their times one after another: the window ends with the last of
        # them, or all but one token of its last step would be lost.
        end = max(next(t for t in times if t >= first_end) for times in stamps)
        between = sum(1 for times in stamps for t in times if start < t <= end)
        decode_tok_s = between / (end - start)
    return Figures(decode_tok_s, tokens / run_s, run_s)


def build_model(shape: str, device: str) -> Any:
    """The shape with random weights, in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "model_type")}
    config = AutoConfig.for_model(SHAPES[shape]["model_type"], **fields)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def use_attention(model: Any, attention: str, fields: dict[str, Any]) -> None:
    """Set the model's attention, under the name that the installed version reads."""
    # Without auto_switch_to_flash, a plain name is taken as leave to fetch a flash kernel.
    paged = attention == "eager" or (attention == "sdpa" and "auto_switch_to_flash" not in fields)
    model.set_attn_implementation(f"paged|{attention}" if paged else attention)


def generate(model: Any, work: Work, tokens: int, config: Any) -> tuple[Figures, float]:
    """One call for `tokens` output tokens each: its figures and its duration in seconds.

    Raises RuntimeError where a request failed or did not get its tokens.
    """
    from transformers import GenerationConfig

    rng = np.random.default_rng(0)
    shape = (work.batch, work.input_len)
    prompts = rng.integers(0, model.config.vocab_size, shape).tolist()
    # Our warm run captures just the graphs of this work; its own captures the largest step that its
    # cache could hold, which takes much memory under a mask.
    wanted = {
        "continuous_batching_config": config,
        "persistent_manager": True,
        "warmup": model.config._attn_implementation == "flash_attention_2",
    }
    takes = inspect.signature(model.generate_batch).parameters
    began = time.perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        record_timestamps=True,
        **{name: value for name, value in wanted.items() if name in takes},
    )
    call_s = time.perf_counter() - began
    errors = [output.error for output in outputs.values() if output.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {work.batch} requests failed: {errors[0]}")
    lengths = [len(output.timestamps or ()) for output in outputs.values()]
    if lengths != [tokens] * work.batch:
        raise RuntimeError(f"{work.batch} x {tokens} tokens were asked for, {lengths} came")
    created = [output.created_time for output in outputs.values()]
    return figures(created, [output.timestamps for output in outputs.values()]), call_s


def measure(model: Any, setting: Setting, work: Work) -> Figures:
    """One setting: a warm run, then the measured one, with the same manager and cache."""
    from transformers import ContinuousBatchingConfig

    fields = known_fields(ContinuousBatchingConfig, config_fields(setting, work))
    use_attention(model, setting.attention, fields)
    config = ContinuousBatchingConfig(**fields)
    try:
        # Which graphs a run needs depends on how many tokens early requests are ahead of late
        # ones, so with graphs the warm run is as long as the measured one.
        warm_tokens = work.output_len if setting.graphs else min(WARM_TOKENS, work.output_len)
        warm, warm_call_s = generate(model, work, warm_tokens, config)
        found, call_s = generate(model, work, work.output_len, config)
    finally:
        model.destroy_cached_continuous_batching_manager()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA was not used
    setup_s = warm_call_s - warm.run_s
    return dataclasses.replace(found, setup_s=setup_s, total_s=setup_s + call_s)


def measure_all(model: Any, settings: Sequence[Setting], work: Work) -> dict[str, Figures]:
    """Every setting's figures by its name; a setting that fails is printed and left out."""
    found: dict[str, Figures] = {}
    for setting in settings:
        label = f"b{work.batch} {setting}:"
        try:
            result = measure(model, setting, work)
        except Exception as error:  # noqa: BLE001 - another project's code: one setting, not all
            sentence = (str(error).strip().splitlines() or [""])[0]
            print(f"{label} failed: {type(error).__name__}: {sentence}", flush=True)
            continue
        found[str(setting)] = result
        decode = "no window" if result.decode_tok_s is None else f"{result.decode_tok_s:.1f} tok/s"
        print(
            f"{label} decode {decode}, run {result.run_tok_s:.1f} tok/s in {result.run_s:.2f} s,"
            f" total {result.total_s:.2f} s with {result.setup_s:.2f} s of set-up",
            flush=True,
        )
    return found


def report(results: ResultFile, shape: str, work: Work, found: dict[str, Figures]) -> None:
    """A line for each figure that exists: the best setting's value, and all of them beside it."""
    import transformers

    for figure in ("decode_tok_s", "run_tok_s"):
        values = {name: getattr(result, figure) for name, result in found.items()}
        values = {name: round(value, 2) for name, value in values.items() if value is not None}
        if not values:
            continue
        best = max(values, key=lambda name: values[name])
        fields = {k: v for k, v in dataclasses.asdict(found[best]).items() if v is not None}
        results.add(
            f"{shape}.generate_batch.{figure}.b{work.batch}", values[best], "tok/s",
            transformers=transformers.__version__, weights="random", setting=best, settings=values,
            input_len=work.input_len, output_len=work.output_len,
            **{name: round(value, 3) for name, value in fields.items()},
        )  # fmt: skip


def main() -> int:
    """Measure one shape; 1 where a batch ran under no setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--settings", type=parse_setting, nargs="+", metavar="SETTING")
    args = parser.parse_args()
    settings = args.settings or default_settings(args.device)
    if args.device == "cpu" and any(setting.graphs for setting in settings):
        parser.error("settings: +graphs needs --device cuda")
    results = ResultFile(args.out)
    model = build_model(args.shape, args.device)
    failed = False
    for batch in args.batches:
        work = Work(batch, args.input_len, args.output_len)
        found = measure_all(model, settings, work)
        report(results, args.shape, work, found)
        failed = failed or not found
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
