"""Which kernel variants steps need beyond those that idle moments compiled: a script, for the test.

    python -m tests.kernels.service_variants SHAPE:DTYPE:ROWS:TOKENS[:deterministic] ...

ROWS, TOKENS: max_num_seqs and max_num_batched_tokens. GPU runners on tensors without memory; every
launch is noted by what Triton would compile for it, and nothing is compiled or run. Prints one JSON
object a line: pieces (of idle work before graphs are captured), prepared (variants after all idle
work), late (kernels of which a step needed another variant, and that step), captured_late (the same
of prompt graphs captured right after the idle work that is no capture: kind of sampling -> kernels
and graphs, kinds in their order).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bench.compile_check import DTYPES, LIMITS, parts_of, two_layer_spec
from bench.offline import pretend
from broker.ring.records import Sampling
from engine.gpu.captured import CapturedStep
from engine.gpu.graph_cache import GraphCache
from engine.gpu.memory import StepLimits
from engine.gpu.row_tables import SampleKind
from engine.gpu.runner import GpuRunner
from engine.gpu.staging import StepSlots
from engine.model.spec import ModelSpec
from engine.plan import NewRow, RunnerInfo, StepPlan

DECODE_ROWS = (
    0, 1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 192,
    193, 200, 224, 255, 256,
)  # fmt: skip
CHUNKS: tuple[list[int], ...] = (
    [], [1], [16], [7, 300], [64] * 5, [1] * 40, [513], [1024, 9], [700] * 3, [2048], [3000],
    [4095, 4097], [7000], [7900],
)  # fmt: skip
SAMPLINGS = (
    Sampling(),
    Sampling(seed=3, temperature=0.5, top_p=0.9),
    Sampling(seed=4, temperature=0.5, presence_penalty=1.5),
)
NONE = np.zeros(0, np.int32)


class Seen:
    """Variants of kernels that launches asked for, by name and what Triton tells them apart by."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()

    def note(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's hook before a compilation; True: no compilation, no launch."""
        self.keys.add((fn.name, key))
        return True


def stand_in_for_a_device(seen: Seen) -> None:
    """Graphs are launched kernel by kernel, and every launch is noted only."""
    pretend()
    triton.knobs.runtime.jit_cache_hook = seen.note
    CapturedStep.capture = lambda self, spare, site: self.run(spare)  # type: ignore[method-assign]
    CapturedStep.replay = lambda self: self.run(self._slots)  # type: ignore[method-assign]
    StepSlots._check = lambda self, step: None  # type: ignore[method-assign]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment,return-value]


def make_runner(
    spec: ModelSpec, dtype: torch.dtype, deterministic: bool, limits: StepLimits
) -> GpuRunner:
    """A runner on tensors without memory."""
    decoder, tables, buffers = parts_of(spec, dtype, deterministic, limits)
    info = RunnerInfo(
        model="", architecture=spec.architecture, device="none", dtype=str(dtype),
        vocab_size=spec.vocab_size, max_model_len=limits.max_model_len, eos_token_ids=(),
        block_size=limits.block_size, num_blocks=64, max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        load_s=0.0, weight_bytes=0, kv_bytes=0,
    )  # fmt: skip
    graphs = GraphCache(decoder, tables, buffers, limits)
    return GpuRunner(info, decoder, tables, buffers, graphs, limits)


def mixes(limits: StepLimits) -> Iterator[StepPlan]:
    """Steps of many mixes with each kind of sampling; in each the last rows are new."""
    steps = itertools.product(SAMPLINGS, DECODE_ROWS, CHUNKS)
    for step_id, (sampling, num_decode, chunks) in enumerate(steps):
        num_new = np.array([1] * num_decode + chunks, np.int32)
        num_rows = len(num_new)
        if not 0 < num_rows <= limits.max_num_seqs:
            continue
        if num_new.sum() > limits.max_num_batched_tokens:
            continue
        ids = np.arange(1 + 31 * (step_id % 5), dtype=np.int32)
        num_taken = min(1 + step_id % 6, num_rows)
        new_rows = tuple(
            NewRow(row, ids, len(ids), sampling, NONE, 0)
            for row in range(num_rows - num_taken, num_rows)
        )
        # Some steps have more changes than a graph takes, in some no prompt is done.
        changes = np.arange((0, 1, num_rows + 5)[step_id % 3], dtype=np.int32)
        sample = np.ones(num_rows, np.bool_)
        sample[num_decode:] = step_id % 4 != 3
        yield StepPlan(
            step_id, new_rows, changes % num_rows, changes // num_rows, changes,
            np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32), num_new,
            sample, num_decode,
        )  # fmt: skip


def late_captures(runner: GpuRunner, seen: Seen) -> dict[str, list[str]]:
    """Capture every prompt graph there is; kind of sampling -> kernels that needed another variant,
    and for which graph."""
    graphs = runner._graphs
    found: dict[str, list[str]] = {}
    for kind in SampleKind:
        late = found.setdefault(kind.name, [])
        for rows, sizes in graphs.prompt_sizes.items():
            for tokens in sizes:
                before = set(seen.keys)
                graphs._capture(("prompt", tokens, rows, kind))
                late += [f"{name}: {tokens} of {rows}" for name, _ in seen.keys - before]
    return found


def late_steps(runner: GpuRunner, limits: StepLimits, seen: Seen) -> Iterator[str]:
    """Serve, and tell which kernels needed another variant, and for which step."""
    for plan in mixes(limits):
        before = set(seen.keys)
        runner.launch(plan)
        runner.collect()
        chunks = plan.num_new[plan.num_decode :].tolist()
        yield from (f"{name}: {plan.num_decode} + {chunks}" for name, _ in seen.keys - before)


def variants_of(spec: ModelSpec, case: list[str], seen: Seen) -> dict[str, Any]:
    """Prepare a runner, serve, and tell what came late."""
    limits = StepLimits(int(case[2]), int(case[3]), LIMITS.max_model_len, LIMITS.block_size)
    parts = (spec, DTYPES[case[1]], case[4:] == ["deterministic"], limits)
    seen.keys.clear()
    runner = make_runner(*parts)
    pieces = compile_ahead(runner)
    while runner.prepare():
        pass
    prepared = len(seen.keys)
    late = list(late_steps(runner, limits, seen))
    seen.keys.clear()
    runner = make_runner(*parts)
    compile_ahead(runner)
    captured_late = late_captures(runner, seen)
    return {"pieces": pieces, "prepared": prepared, "late": late, "captured_late": captured_late}


def compile_ahead(runner: GpuRunner) -> int:
    """Do the idle work up to the first capture, which is one of a decode step; returns the number
    of pieces."""
    pieces = 0
    while not runner._graphs.num_captured and runner.prepare():
        pieces += 1
    return pieces


def main() -> int:
    """Each case on a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    seen = Seen()
    stand_in_for_a_device(seen)
    for case in (text.split(":") for text in parser.parse_args().cases):
        with tempfile.TemporaryDirectory() as scratch:
            spec = two_layer_spec(case[0], Path(scratch))
        print(json.dumps(variants_of(spec, case, seen)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
