"""Sweep of GEMV and small-M GEMM tiles; fills _GEMV_TILES and _SMALL_GEMM_TILES of
kernels/tiles.py.

    python -m bench.sweep_gemm [--compile-part I/N] [--seconds S]

Every layer is timed in a chain with itself (programmatic dependent launch, weights rotated),
fused as in the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from kernels.gemv import gemv
from kernels.held_gemm import MAX_HELD_M, HeldTile
from kernels.product_tiles import GemvTile, SmallGemmTile
from kernels.shared_memory import TABLE_BYTES
from kernels.small_gemm import small_linear
from kernels.split_k import new_gemm_workspace
from ops.bench import kernel_inputs as inputs
from ops.bench.kernel_timing import num_sets, time_calls

SHAPES = [inputs.QWEN3_06B, inputs.QWEN3_8B, inputs.SMOLLM2]
M_BUCKETS = (8, 64)


def gemv_tiles(n: int, k: int) -> list[GemvTile]:
    """Candidates for a weight [n, k]."""
    up = 1 << (k - 1).bit_length()
    sizes = sorted({min(up, s) for s in (512, 1024, 2048, 4096)})
    tiles = [GemvTile(2, b, w) for b in sizes for w in (1, 2, 4)]
    tiles += [
        GemvTile(4, min(up, 1024), 4),
        GemvTile(1, min(up, 2048), 2),
        GemvTile(1, min(up, 1024), 1),
    ]
    if n > 32768:
        tiles = [
            GemvTile(bn, min(up, b), w) for bn in (2, 4, 8) for b in (1024, 2048) for w in (4, 8)
        ]
    return list(dict.fromkeys(tiles))


_FEW = ((16, 256, 2, 4), (16, 128, 4, 6), (32, 256, 4, 4), (32, 128, 4, 6), (64, 128, 4, 5))
_MANY = ((16, 128, 4, 6), (32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6))
_HEAD = ((128, 64, 4, 5), (128, 128, 4, 3), (128, 64, 8, 5))
# By descriptors, which take no registers for addresses. Each column tile reads all of x, which
# counts beyond 16 rows: wide tiles, and more parts of K to have enough programs. Of some there are
# two numbers of stages: with the smaller one the next kernel's programs fit beside these.
_FEW_TMA = ((16, 256, 4, 4), (32, 128, 4, 6), (64, 128, 4, 4))
_MANY_TMA = (
    (32, 128, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4),
    (128, 64, 4, 5), (128, 64, 8, 4), (128, 64, 8, 5),
)  # fmt: skip
"""Outputs, K, warps, stages; with two weights a tile has two thirds of the stages."""


def gemm_tiles(m: int, n: int, k: int, glu: bool) -> list[SmallGemmTile]:
    """Candidates for m rows and n outputs of length k."""
    tiles = [(*tile, False) for tile in (_FEW if m <= 16 else _MANY)]
    if n > 16384:
        tiles = [tile for tile in tiles if tile[0] >= 32] + [(*tile, False) for tile in _HEAD]
    tiles += [(*tile, True) for tile in (_FEW_TMA if m <= 16 else _MANY_TMA)]
    if glu:
        tiles = [(bn, bk, warps, max(-(-s * 2 // 3), 2), tma) for bn, bk, warps, s, tma in tiles]
    return [
        SmallGemmTile(block_n, block_k, split, warps, stages, tma=tma)
        for block_n, block_k, warps, stages, tma in tiles
        for split in _splits(n, block_n, warps, glu)
        if k // split >= block_k
    ]


def held_tiles(m: int, n: int, k: int, glu: bool) -> list[HeldTile]:
    """Candidates that hold their weights in shared memory, of two-byte types; none for more rows
    than they take, or where there are programs for several rounds."""
    if m > MAX_HELD_M or n > 8192:
        return []
    tiles = [
        HeldTile(block_n, split, warps)
        for block_n, warps in ((16, 4), (32, 4), (16, 8))
        for split in ((1,) if glu else (1, 2, 4))
        if split == 1 or 8 * block_n >= 32 * warps
    ]
    return [tile for tile in tiles if tile.shared_bytes(m, k, 2, glu) <= TABLE_BYTES - (4 << 10)]


def _splits(n: int, block_n: int, num_warps: int, glu: bool) -> tuple[int, ...]:
    """Parts of K: for about one program a processor, or somewhat more. The sums of wide tiles take
    all registers of four warps, and leave none for those of other parts."""
    if glu or n > 6144 or (block_n >= 128 and num_warps < 8):
        return (1,)
    if n <= 1024 or block_n >= 128:
        return (1, 2, 4)
    return (1, 2)


def layer_options(shape: inputs.ModelShape, name: str, m: int) -> dict[str, object]:
    """Fusion of one layer as the model uses it; the norm is fused for one row only."""
    if name in ("o", "down"):
        return {"residual": inputs.random(m, shape.hidden)}
    norm = {"norm_weight": inputs.random(shape.hidden), "eps": 1e-6} if m == 1 else {}
    return norm | ({"glu": True} if name == "gate_up" else {})


Job = tuple[inputs.ModelShape, str, int, int, int, GemvTile | SmallGemmTile]


def jobs() -> list[Job]:
    """(shape, layer, outputs N, K, M, tile) of every configuration."""
    found: list[Job] = []
    for shape in SHAPES:
        for name, n, k in [*shape.linear_layers, ("head", shape.vocab_size, shape.hidden)]:
            glu = name == "gate_up"
            outputs = n // 2 if glu else n
            found += [(shape, name, outputs, k, 1, tile) for tile in gemv_tiles(outputs, k)]
            for m in M_BUCKETS:
                found += [
                    (shape, name, outputs, k, m, tile) for tile in gemm_tiles(m, outputs, k, glu)
                ]
    return found


def launcher(job: Job) -> Callable[[torch.Tensor], None]:
    """A launch of one configuration, given a weight."""
    shape, name, n, k, m, tile = job
    options = layer_options(shape, name, m)
    x = inputs.random(m, k)
    out = options.get("residual", torch.empty(m, n, dtype=inputs.DTYPE, device=inputs.DEVICE))
    workspace = new_gemm_workspace(inputs.DEVICE)

    def run(weight: torch.Tensor) -> None:
        if isinstance(tile, GemvTile):
            gemv(out, x, weight, tile=tile, **options)  # type: ignore[arg-type]
        else:
            small_linear(out, x, weight, workspace, tile=tile, **options)  # type: ignore[arg-type]

    return run


def weight_rows(job: Job) -> int:
    """Rows of the weight: twice the outputs where gate and up are merged."""
    return job[2] * (2 if job[1] == "gate_up" else 1)


def compile_part(part: int, parts: int) -> None:
    """Run every parts-th configuration once."""
    for job in jobs()[part::parts]:
        try:
            launcher(job)(inputs.random(weight_rows(job), job[3]))
        except OutOfResources as error:
            print(f"{job[0].name} {job[1]} m{job[4]} {job[5]}: {error}")


def sweep(seconds: float) -> list[dict[str, float | str | int]]:
    """Time every configuration; the best of each (shape, layer, M) first."""
    began = time.monotonic()
    results: list[dict[str, float | str | int]] = []
    weights: list[torch.Tensor] = []
    for job in jobs():
        if time.monotonic() - began > seconds:
            print(f"stopped at {job[0].name} {job[1]} m{job[4]}")
            break
        shape, name, n, k, m, tile = job
        size = (weight_rows(job), k)
        if not weights or weights[0].shape != size:
            weights = [
                inputs.random(*size, scale=k**-0.5) for _ in range(num_sets(2 * size[0] * k))
            ]
        try:
            run = launcher(job)
            timing = time_calls([partial(run, w) for w in weights], replays=5)
        except OutOfResources:
            continue
        record: dict[str, float | str | int] = {
            "layer": f"{shape.name}.{name}",
            "n": n,
            "k": k,
            "m": m,
        }
        record |= {"us": round(timing.p50_us, 2), "tile": str(tile)}
        results.append(record | {"tb_s": round(2 * size[0] * k / timing.p50_us / 1e6, 2)})
    results.sort(key=lambda r: (str(r["layer"]), int(r["m"]), float(r["us"])))
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-part", default="")
    parser.add_argument("--seconds", type=float, default=90.0)
    args = parser.parse_args()
    if args.compile_part:
        part, parts = args.compile_part.split("/")
        compile_part(int(part), int(parts))
        return
    for result in sweep(args.seconds):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
