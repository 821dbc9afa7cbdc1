"""Compiles every kernel that the engine launches, for an H200 that need not be there.

    python -m bench.compile_check [--shapes qwen3-8b ...] [--all]

Runs whole decode and prompt steps on tensors without memory, so each kernel is compiled with the
very arguments and tiles that it gets in service. Prints those that spill or do not fit (with --all
all of them) and one JSON line last; exit code 1 if one does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

import engine.gpu.attention_plans as attention_plans
from bench.offline import NUM_PROCESSORS, Compiled, OfflineDriver, compiled_kernels, pretend
from engine.gpu.buffers import SharedBuffers, new_shared_buffers
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.decoder import GpuDecoder
from engine.gpu.kv_memory import new_kv_memory
from engine.gpu.linear import Linears
from engine.gpu.memory import StepLimits
from engine.gpu.packed_step import PackedSteps
from engine.gpu.prompt_graph import PromptGraph
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.staging import StepSlots
from engine.loader import read_spec
from engine.model.spec import ModelSpec
from engine.model.weights import assemble, named_shapes
from kernels.product_tiles import max_fused_rows
from kernels.split_k import new_gemm_workspace
from ops.bench.shapes import SHAPES, write_shape

META = torch.device("meta")
LIMITS = StepLimits(256, 8448, 2048, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def parts_of(
    spec: ModelSpec, dtype: torch.dtype, deterministic: bool, limits: StepLimits = LIMITS
) -> tuple[GpuDecoder, RowTables, SharedBuffers]:
    """What steps are made of, on tensors without memory."""
    weights = assemble(
        spec,
        {name: torch.empty(shape, dtype=dtype, device=META) for name, shape in named_shapes(spec)},
    )
    tables = RowTables(limits, spec.vocab_size, META)
    decoder = GpuDecoder(
        spec, weights, new_kv_memory(spec, 64, limits.block_size, dtype, META),
        tables.block_table, tables.token_table,
        Linears(deterministic, new_gemm_workspace(META), max_fused_rows(spec.hidden_size, dtype)),
    )  # fmt: skip
    attention_plans.num_processors = lambda device: NUM_PROCESSORS
    return decoder, tables, new_shared_buffers(spec, limits, dtype, META, deterministic)


def steps_of(spec: ModelSpec, dtype: torch.dtype, deterministic: bool, sizes: list[int]) -> None:
    """Launch decode steps of these sizes, captured prompt steps, and all that warms up the steps
    that are launched kernel by kernel."""
    decoder, tables, buffers = parts_of(spec, dtype, deterministic)
    slots = StepSlots(4096, LIMITS.max_num_seqs, META)
    parts = (decoder, tables, buffers, LIMITS.block_size, slots)
    for size in sizes:
        for kind in SampleKind:
            DecodeGraph(size, kind, *parts).run(slots)
    for tokens, rows in ((16, 1), (1024, 1), (2048, 8)):
        PromptGraph(tokens, rows, SampleKind.PLAIN, *parts).run(slots)
    tables.warm_up()
    for _ in PackedSteps(decoder, tables, buffers, LIMITS).warm_ups():
        pass


def two_layer_spec(shape: str, directory: Path) -> ModelSpec:
    """A named shape with two layers: those behind the first launch the same kernels."""
    spec = read_spec(write_shape(shape, directory))
    object.__setattr__(spec, "num_layers", 2)
    return spec


def check(shapes: list[str], dtypes: list[str], sizes: list[int]) -> OfflineDriver:
    """Compile all steps of these shapes."""
    offline = pretend()
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            spec = two_layer_spec(shape, Path(scratch))
            for dtype in dtypes:
                for deterministic in (False, True):
                    began = time.monotonic()
                    steps_of(spec, DTYPES[dtype], deterministic, sizes)
                    took = time.monotonic() - began
                    print(
                        f"{shape} {dtype} deterministic={deterministic}: {took:.0f} s",
                        file=sys.stderr,
                    )
    return offline


def _line(kernel: Compiled) -> str:
    return (
        f"{kernel.name:<26} {kernel.num_warps} warps {kernel.registers:>4} registers"
        f" {kernel.stack_bytes:>5} B stack {kernel.shared_bytes:>7} B shared"
        f" {'wgmma' if kernel.has_wgmma else '     '} {kernel.options}"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    offline = check(args.shapes, args.dtypes, args.sizes)
    kernels = sorted(compiled_kernels(), key=lambda k: (k.name, k.options))
    bad = [k for k in kernels if not k.fits]
    for kernel in kernels if args.all else [k for k in kernels if k.stack_bytes or not k.fits]:
        print(_line(kernel))
    report = {"kernels": len(kernels), "launches": offline.num_launches}
    print(json.dumps(report | {"do_not_fit": [asdict(k) for k in bad]}))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
