"""Sweep of GEMV and small-M GEMM tiles; fills _GEMV_TILES and _SMALL_GEMM_TILES of kernels/tiles.py.

    python -m bench.sweep_gemm [--compile-part I/N] [--seconds S]

Every layer is timed in a chain with itself (programmatic dependent launch, weights rotated), fused as in the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from kernels.gemv import gemv
from kernels.small_gemm import new_gemm_workspace, small_linear
from kernels.tiles import GemvTile, SmallGemmTile
from ops.bench import kernel_cases as cases
from ops.bench.kernel_timing import num_sets, time_calls

SHAPES = [cases.QWEN3_06B, cases.QWEN3_8B, cases.SMOLLM2]
M_BUCKETS = (8, 32, 64)


def gemv_tiles(n: int, k: int) -> list[GemvTile]:
    """Candidates for a weight [n, k]."""
    up = 1 << (k - 1).bit_length()
    sizes = sorted({min(up, s) for s in (512, 1024, 2048, 4096)})
    tiles = [GemvTile(2, b, w) for b in sizes for w in (1, 2, 4) if 64 <= b // w // 8 * 8]
    tiles += [GemvTile(4, min(up, 1024), 4), GemvTile(1, min(up, 2048), 2)]
    if n > 32768:
        tiles = [GemvTile(bn, min(up, b), w) for bn in (4, 8) for b in (512, 1024) for w in (4, 8)]
    return list(dict.fromkeys(tiles))


def gemm_tiles(m: int, n: int, k: int) -> list[SmallGemmTile]:
    """Candidates for m rows and a weight [n, k]."""
    tiles = []
    if m <= 16:
        tiles = [(16, 256, 2, 4), (32, 256, 4, 4), (32, 128, 4, 6), (64, 128, 4, 5)]
    elif m <= 32:
        tiles = [(16, 256, 4, 3), (32, 128, 4, 5), (64, 128, 4, 4), (16, 128, 4, 6)]
    else:
        tiles = [(16, 128, 4, 6), (32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6)]
    if n > 16384:
        tiles = [t for t in tiles if t[0] >= 32] + [(128, 64, 4, 5)]
    splits = (1, 2, 4) if n <= 1024 else (1, 2) if n <= 6144 else (1,)
    return [
        SmallGemmTile(bn, bk, split, warps, stages)
        for bn, bk, warps, stages in tiles
        for split in splits
        if k // split >= bk
    ]


def layer_options(
    shape: cases.ModelShape, name: str, m: int
) -> tuple[torch.Tensor, dict[str, object]]:
    """Input and fusion of one layer as the model uses it."""
    k = dict((n, k) for n, _, k in [*shape.linear_layers, ("head", 0, shape.hidden)])[name]
    if name == "o":
        return cases.random(m, k), {"residual": cases.random(m, shape.hidden)}
    if name == "down":
        return cases.random(m, 2 * k), {"silu": True, "residual": cases.random(m, shape.hidden)}
    return cases.random(m, k), {"norm_weight": cases.random(k), "eps": 1e-6}


def jobs() -> list[tuple[cases.ModelShape, str, int, int, int, object]]:
    """(shape, layer, N, K, M, tile) of every configuration."""
    found: list[tuple[cases.ModelShape, str, int, int, int, object]] = []
    for shape in SHAPES:
        for name, n, k in [*shape.linear_layers, ("head", shape.vocab_size, shape.hidden)]:
            found += [(shape, name, n, k, 1, tile) for tile in gemv_tiles(n, k)]
            for m in M_BUCKETS:
                found += [(shape, name, n, k, m, tile) for tile in gemm_tiles(m, n, k)]
    return found


def call(
    shape: cases.ModelShape, name: str, m: int, tile: object
) -> Callable[[torch.Tensor], None]:
    """A launcher of one configuration, given a weight."""
    x, options = layer_options(shape, name, m)
    workspace = new_gemm_workspace(cases.DEVICE)

    def run(weight: torch.Tensor) -> None:
        out = options.get("residual")
        target = (
            out
            if isinstance(out, torch.Tensor)
            else outs.setdefault(
                0, torch.empty(m, weight.shape[0], dtype=cases.DTYPE, device=cases.DEVICE)
            )
        )
        if isinstance(tile, GemvTile):
            gemv(target, x, weight, tile=tile, **options)  # type: ignore[arg-type]
        elif isinstance(tile, SmallGemmTile):
            small_linear(target, x, weight, workspace, tile=tile, **options)  # type: ignore[arg-type]

    outs: dict[int, torch.Tensor] = {}
    return run


def compile_part(part: int, parts: int) -> None:
    """Run every parts-th configuration once."""
    for shape, name, n, k, m, tile in jobs()[part::parts]:
        try:
            call(shape, name, m, tile)(cases.random(n, k))
        except Exception as error:  # noqa: BLE001 (a tile that does not fit is a result too)
            print(f"{shape.name} {name} m{m} {tile}: {type(error).__name__}")


def sweep(seconds: float) -> list[dict[str, float | str | int]]:
    """Time every configuration; the best of each (shape, layer, M) first."""
    began = time.monotonic()
    results: list[dict[str, float | str | int]] = []
    weights: dict[tuple[int, int], list[torch.Tensor]] = {}
    for shape, name, n, k, m, tile in jobs():
        if time.monotonic() - began > seconds:
            break
        if (n, k) not in weights:
            weights.clear()
            weights[n, k] = [cases.random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
        run = call(shape, name, m, tile)
        try:
            timing = time_calls([lambda w=w, run=run: run(w) for w in weights[n, k]], replays=5)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 (a tile that does not fit is a result too)
            print(f"{shape.name} {name} m{m} {tile}: {type(error).__name__}")
            continue
        results.append(
            {
                "layer": f"{shape.name}.{name}",
                "n": n,
                "k": k,
                "m": m,
                "us": round(timing.p50_us, 2),
                "tb_s": round(2 * n * k / timing.p50_us / 1e6, 2),
                "tile": str(tile),
            }
        )
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
