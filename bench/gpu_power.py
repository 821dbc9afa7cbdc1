"""Kernels of the 8B shape in steady state: their time when the card is cold and when it is warm,
its power and its clock, and the energy of a call.

    python -m bench.gpu_power --out results.jsonl [--seconds 0.7] [--kernels NAME ...]
    TRITON_INTERPRET=1 python -m bench.gpu_power --device cpu      # tiny shapes: a dry run

A kernel that draws more than the card may is slowed down after some milliseconds: what a short
timing says of it does not hold in a step that comes after thousands like it. Needs NVML's Python
package (`pip install nvidia-ml-py`), but for the dry run, whose power and clock are null.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from bench.offline import ready_interpreter
from bench.report import ResultFile
from kernels.fixed_gemm import fixed_linear
from kernels.gemv import gemv
from kernels.prefill import prefill_attention
from kernels.product_tiles import max_fused_rows
from kernels.small_gemm import small_linear
from kernels.split_k import new_gemm_workspace
from ops.bench.kernel_inputs import (
    DEVICE,
    DTYPE,
    QWEN3_8B,
    ModelShape,
    decode_plan_for,
    decode_set,
    engine_tile,
    random,
)
from ops.bench.kernel_timing import num_sets, time_calls

LAUNCHES = 12  # in one graph, at least
COLD_REPLAYS = 2
REST_S = 0.3
"""Without work before a kernel's first replays, so that the clock is up again."""
BLOCK_SIZE = 64

Call = Callable[[], object]


class MissingPackageError(RuntimeError):
    """A Python package is not there; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Decode rows and their tokens; bytes of the copy; rows of the products; prompts and their
    tokens."""

    shape: ModelShape
    decode_rows: int
    context: int
    copy_bytes: int
    product_rows: tuple[int, ...]
    prompts: int
    prompt_len: int


FULL = Sizes(QWEN3_8B, 256, 1152, 2 << 30, (1, 8, 256, 8192), 8, 1024)
TINY = Sizes(ModelShape("tiny", 64, 64, 4, 2, 16, 1, 512), 2, 40, 4096, (1, 8), 1, 24)


@dataclass(frozen=True, slots=True)
class Steady:
    """us, first_us: of a call, warm and in the first replays after a rest. watts: mean power of the
    card, sm_mhz: clock of its processors, mj: millijoules a call; None where nothing measures it.
    """

    us: float
    first_us: float
    watts: float | None = None
    sm_mhz: int | None = None
    mj: float | None = None


class Meter(Protocol):
    """What a card says of itself."""

    def joules(self) -> float:
        """Energy since some time in the past."""
        ...

    def sm_mhz(self) -> int:
        """Clock of the processors now."""
        ...


class NvmlMeter:
    """Asks NVML about one card; uuid: as NVML writes it. Raises MissingPackageError."""

    def __init__(self, uuid: str) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise MissingPackageError(
                "no module pynvml: power and clock come from NVML, `pip install nvidia-ml-py`"
            ) from error
        self._nvml.nvmlInit()
        self._card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)) / 1e3

    def sm_mhz(self) -> int:
        """Clock of the processors now."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM))


class Replays(Protocol):
    """Calls that run again and again."""

    num_calls: int

    def run(self, count: int, meanwhile: Callable[[], object] | None = None) -> float:
        """Replay so often; microseconds a call. meanwhile: called while they run."""
        ...


class CapturedCalls:
    """Calls in one CUDA graph, in order, repeated up to LAUNCHES."""

    def __init__(self, calls: Sequence[Call]) -> None:
        repeated = [*calls] * -(-LAUNCHES // len(calls))
        self.num_calls = len(repeated)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for call in calls:
                call()
            self._stream.synchronize()
            with torch.cuda.graph(self._graph, stream=self._stream):
                for call in repeated:
                    call()

    def run(self, count: int, meanwhile: Callable[[], object] | None = None) -> float:
        """See `Replays`."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                self._graph.replay()
            end.record()
        if meanwhile is not None:
            meanwhile()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count / self.num_calls


def steady(
    replays: Replays,
    meter: Meter,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[float], None] = time.sleep,
) -> Steady:
    """After a rest: two replays, half of `seconds` to warm up, and `seconds` that count."""
    rest(REST_S)
    first_us = replays.run(COLD_REPLAYS)
    count = max(2, round(seconds * 1e6 / (first_us * replays.num_calls)))
    replays.run(count // 2)
    clocks: list[int] = []
    joules, began = meter.joules(), clock()
    us = replays.run(count, lambda: clocks.append(meter.sm_mhz()))
    watts = (meter.joules() - joules) / (clock() - began)
    return Steady(us, first_us, round(watts, 1), clocks[0], round(watts * us / 1e3, 4))


def kernels(sizes: Sizes) -> dict[str, Callable[[], list[Call]]]:
    """Name -> what allocates a kernel's inputs and returns its launches."""
    found: dict[str, Callable[[], list[Call]]] = {
        f"decode_attention.b{sizes.decode_rows}": partial(_decode_attention, sizes),
        "copy": partial(_copy, sizes),
    }
    for rows in sizes.product_rows:
        is_fused = rows <= max_fused_rows(sizes.shape.hidden, DTYPE)
        for name in ("cublas", "fixed", *(["fused"] if is_fused else [])):
            found[f"gate_up.m{rows}.{name}"] = partial(_gate_up, sizes.shape, rows, name)
    prompts = f"prompt_attention.{sizes.prompts}x{sizes.prompt_len}"
    return found | {prompts: partial(_prompt_attention, sizes)}


def _decode_attention(sizes: Sizes) -> list[Call]:
    """As a decode step launches it, its new tokens inside."""
    s = sizes.shape
    lengths = [sizes.context] * sizes.decode_rows
    inputs = decode_set(lengths, s, BLOCK_SIZE)
    plan = decode_plan_for(inputs, engine_tile(s, sizes.decode_rows))
    return [partial(inputs.run, *plan)]


def _copy(sizes: Sizes) -> list[Call]:
    source = random(sizes.copy_bytes // DTYPE.itemsize)
    return [partial(torch.empty_like(source).copy_, source)]


def _gate_up(shape: ModelShape, rows: int, name: str) -> list[Call]:
    """The product of cuBLAS alone, ours with the activation, as in the model: fixed tiles, or what
    is fused with its neighbours (one row: matrix times vector)."""
    n, k = 2 * shape.intermediate, shape.hidden
    weights = [random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
    x, workspace = random(rows, k), new_gemm_workspace(DEVICE)
    out = torch.empty(rows, n if name == "cublas" else n // 2, dtype=DTYPE, device=DEVICE)
    if name == "cublas":
        return [partial(torch.mm, x, weight.t(), out=out) for weight in weights]
    if name == "fixed":
        fixed = partial(fixed_linear, out, x, workspace=workspace, glu=True, pdl=True)
        return [partial(fixed, weight=weight) for weight in weights]
    if rows == 1:
        return [partial(gemv, out, x, weight, glu=True) for weight in weights]
    return [partial(small_linear, out, x, weight, workspace, glu=True) for weight in weights]


def _prompt_attention(sizes: Sizes) -> list[Call]:
    s, lengths = sizes.shape, [sizes.prompt_len] * sizes.prompts
    inputs = decode_set(lengths, s, BLOCK_SIZE)
    q = random(sum(lengths), s.num_q_heads, s.head_dim)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    return [
        partial(
            prefill_attention, torch.empty_like(q), q, inputs.k_cache, inputs.v_cache,
            inputs.tables, inputs.rows, inputs.seq_lens, bounds, s.head_dim**-0.5,
        )
    ]  # fmt: skip


def measure(calls: list[Call], meter: Meter | None, seconds: float) -> Steady:
    """In steady state; without a meter each call runs once, and the time means nothing."""
    if meter is None:
        us = time_calls(calls).p50_us
        return Steady(us, us)
    return steady(CapturedCalls(calls), meter, seconds)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--out", type=Path, default=Path("results.jsonl"))
    found.add_argument("--seconds", type=float, default=0.7, help="that count, for each kernel")
    found.add_argument("--kernels", nargs="+", help="names; default: all")
    found.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="cpu: a dry run")
    return found


def main() -> int:
    """Measure and append."""
    command = parser()
    args = command.parse_args()
    meter: Meter | None = None
    if args.device == "cpu":
        if not triton.knobs.runtime.interpret or torch.cuda.is_available():
            command.error("--device cpu is for machines without a GPU, with TRITON_INTERPRET=1")
        ready_interpreter()
    elif not torch.cuda.is_available():
        command.error("torch finds no GPU; TRITON_INTERPRET=1 and --device cpu make a dry run")
    else:
        try:
            meter = NvmlMeter(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        except MissingPackageError as error:
            command.error(str(error))
    found = kernels(TINY if args.device == "cpu" else FULL)
    unknown = set(args.kernels or ()) - set(found)
    if unknown:
        command.error(f"unknown kernels {sorted(unknown)}; there are {list(found)}")
    results = ResultFile(args.out)
    for name in args.kernels or found:
        details = asdict(measure(found[name](), meter, args.seconds))
        results.add(f"power.{name}.us", details.pop("us"), "us", **details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
