"""Sweep of the batch-invariant GEMM's tiles and splits; writes kernels/fixed_gemm_tiles.json.

    python -m bench.sweep_fixed_gemm [--write PATH] [--compile-part I/N] [--seconds S]

Each candidate's result is compared bit for bit with the first one of the same split: a tile that
changes a bit is left out. Splits of K are chosen per shape over all row counts together, since they
are part of the numerics; then the fastest tile per row count. cuBLAS is timed beside.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from kernels.fixed_gemm import fixed_linear
from kernels.fixed_tiles import TABLE_PATH, FixedGemmTile, m_bucket
from kernels.small_gemm import new_gemm_workspace
from ops.bench import kernel_inputs as inputs
from ops.bench.kernel_timing import num_sets, time_calls

ROWS = (8, 64, 256, 2048)
HEAD_ROWS = (8, 64, 256)
FEW_ROWS = 64
TINY = inputs.ModelShape("tiny", 64, 128, 4, 2, 16, 2, 128)


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k], the row counts that it meets, and the type of its outputs: a head's are
    float32, whose tiles take more shared memory."""

    n: int
    k: int
    rows: tuple[int, ...]
    out_dtype: torch.dtype = inputs.DTYPE


def shapes(names: list[str]) -> list[Shape]:
    """Distinct weights of the named models, the largest model first."""
    models = {m.name: m for m in (inputs.QWEN3_8B, inputs.QWEN3_06B, inputs.SMOLLM2, TINY)}
    found: dict[tuple[int, int], Shape] = {}
    for model in (models[name] for name in names):
        for _, n, k in model.linear_layers:
            found.setdefault((n, k), Shape(n, k, ROWS if model is not TINY else (3,)))
        head = (model.vocab_size, model.hidden)
        rows = HEAD_ROWS if model is not TINY else (3,)
        found.setdefault(head, Shape(*head, rows, torch.float32))
    return list(found.values())


def splits_of(shape: Shape) -> tuple[int, ...]:
    """Parts of K worth trying: where N alone does not fill the GPU."""
    if shape.n > 8192:
        return (1,)
    return tuple(s for s in (1, 2, 4) if shape.k // s >= 512 or s == 1)


def candidates(m: int, splits: int) -> list[FixedGemmTile]:
    """Tiles for m rows."""
    parallel = splits > 1 and m <= FEW_ROWS
    found = []
    for tma in (True, False):
        if m <= FEW_ROWS:
            sizes = [(32, 64, 6), (64, 64, 6), (64, 128, 4), (128, 64, 5), (128, 128, 3)]
            found += [FixedGemmTile(64, n, k, 4, s, parallel, tma) for n, k, s in sizes]
            continue
        sizes = [(128, 64, 4, 5), (128, 128, 8, 4), (64, 128, 4, 5), (64, 256, 4, 4)]
        if splits == 1:
            sizes += [(128, 256, 8, 3), (128, 128, 4, 4)]
        found += [FixedGemmTile(bm, bn, 64, w, s, False, tma) for bm, bn, w, s in sizes]
    if m > FEW_ROWS and splits == 1:
        for bm, bn, warps, stages in ((128, 256, 8, 3), (128, 128, 8, 4), (64, 256, 4, 4)):
            found.append(FixedGemmTile(bm, bn, 64, warps, stages, False, True, True))
    return found


Job = tuple[Shape, int, int, FixedGemmTile]


def jobs(names: list[str]) -> list[Job]:
    """(shape, rows, splits, tile), all of one shape together."""
    return [
        (shape, m, splits, tile)
        for shape in shapes(names)
        for m in shape.rows
        for splits in splits_of(shape)
        for tile in candidates(m, splits)
    ]


def compile_part(part: int, parts: int, names: list[str]) -> None:
    """Run every parts-th configuration once, on few columns of the weight."""
    workspace = new_gemm_workspace(inputs.DEVICE)
    seen = set()
    for shape, m, splits, tile in jobs(names):
        key = (shape.k, m <= FEW_ROWS, splits, tile, shape.out_dtype)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts != part:
            continue
        x, weight = inputs.random(m, shape.k), inputs.random(512, shape.k)
        out = torch.empty(m, 512, dtype=shape.out_dtype, device=inputs.DEVICE)
        try:
            fixed_linear(out, x, weight, workspace=workspace, pdl=True, tile=tile, splits=splits)
        except OutOfResources as error:
            print(f"{tile}: {error}")


class Sweep:
    """Times of every configuration, shape by shape."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._workspace = new_gemm_workspace(inputs.DEVICE)

    def shape(self, shape: Shape, limit: int | None) -> dict[str, object] | None:
        """The shape's entry of the table, or None where time ran out."""
        count = num_sets(2 * shape.n * shape.k, limit=8)
        weights = [inputs.random(shape.n, shape.k, scale=shape.k**-0.5) for _ in range(count)]
        best: dict[int, dict[int, tuple[float, FixedGemmTile]]] = {}
        costs: dict[int, float] = {}
        for m in shape.rows:
            x = inputs.random(m, shape.k)
            base = time_calls([partial(linear, x, w) for w in weights], replays=5, min_calls=8)
            for splits in splits_of(shape):
                found = self._rows(shape, m, splits, x, weights, limit)
                if found is None:
                    return None
                best.setdefault(splits, {})[m] = found
                costs[splits] = costs.get(splits, 0.0) + found[0] / base.p50_us
                record = {"n": shape.n, "k": shape.k, "m": m, "splits": splits}
                record |= {"us": round(found[0], 2), "cublas_us": round(base.p50_us, 2)}
                print(json.dumps(record | {"tile": str(found[1])}), flush=True)
        splits = min(costs, key=lambda s: costs[s])
        tiles = {str(m_bucket(m)): asdict(tile) for m, (_, tile) in best[splits].items()}
        return {"n": shape.n, "k": shape.k, "splits": splits, "tiles": tiles}

    def _rows(
        self,
        shape: Shape,
        m: int,
        splits: int,
        x: torch.Tensor,
        weights: list[torch.Tensor],
        limit: int | None,
    ) -> tuple[float, FixedGemmTile] | None:
        """The fastest tile for m rows whose bits are the others'."""
        out = torch.empty(m, shape.n, dtype=shape.out_dtype, device=inputs.DEVICE)
        timed: list[tuple[float, FixedGemmTile]] = []
        reference = torch.empty_like(out)  # every tile has to have the bits of plain small ones
        plain = FixedGemmTile(64, 64, 64, 4, 4)
        fixed_linear(reference, x, weights[0], tile=plain, splits=splits)
        for tile in candidates(m, splits)[:limit]:
            if time.monotonic() > self._end:
                return None
            options = {"workspace": self._workspace, "pdl": True, "tile": tile, "splits": splits}
            try:
                fixed_linear(out, x, weights[0], **options)  # type: ignore[arg-type]
                if not torch.equal(out, reference):
                    print(f"n {shape.n} k {shape.k} m {m} splits {splits}: {tile} has other bits")
                    continue
                calls = [partial(fixed_linear, out, x, w, **options) for w in weights]
                timed.append((time_calls(calls, replays=5, min_calls=8).p50_us, tile))
            except OutOfResources:
                continue
        return min(timed, key=lambda entry: entry[0]) if timed else None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=TABLE_PATH)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--compile-part", default="")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--limit", type=int, help="tiles per row count")
    args = parser.parse_args()
    if args.compile_part:
        part, parts = (int(x) for x in args.compile_part.split("/"))
        compile_part(part, parts, args.models)
        return
    sweep = Sweep(args.seconds)
    entries = []
    for shape in shapes(args.models):
        entry = sweep.shape(shape, args.limit)
        if entry is None:
            print(f"stopped at n {shape.n} k {shape.k}")
            break
        entries.append(entry)
    table = {"made_by": "python -m bench.sweep_fixed_gemm", "shapes": entries}
    args.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
