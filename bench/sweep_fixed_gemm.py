"""Sweep of the batch-invariant GEMM's tiles and splits; writes kernels/fixed_gemm_tiles.json.

    python -m bench.sweep_fixed_gemm [--write PATH] [--models NAME ...] [--only plain|glu]
        [--rows M ...] [--keep-splits] [--seconds S] [--compile-part I/N]

Each candidate's result is compared bit for bit with that of plain small tiles: a tile that changes
a bit is left out. Splits of K are chosen per shape over all row counts together, since they are
part of the numerics; then the fastest tile per row count. cuBLAS is timed beside, for products with
an activation together with the launch for that. What was not swept, by choice or for want of time,
stays in the table as it was. With --rows splits stay as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from bench.fixed_gemm_candidates import candidates
from kernels.activation import silu_mul
from kernels.fixed_gemm import fixed_linear
from kernels.fixed_tiles import FEW_ROWS, TABLE_PATH, FixedGemmTile, m_bucket, read_table
from kernels.split_k import new_gemm_workspace
from ops.bench import kernel_inputs as inputs
from ops.bench.kernel_timing import num_sets, time_calls

ROWS = (8, 64, 128, 256, 512, 2048, 8192)
HEAD_ROWS = (8, 64, 128, 256)
TINY = inputs.ModelShape("tiny", 64, 128, 4, 2, 16, 2, 128)


@dataclass(frozen=True, slots=True)
class Shape:
    """n outputs of k inputs, the row counts that they meet, and the type of the outputs: a head's
    are float32, whose tiles take more shared memory. glu: the weight is [2n, k], gate first.
    residual: added in the product's end, as after attention and MLP."""

    n: int
    k: int
    rows: tuple[int, ...]
    out_dtype: torch.dtype = inputs.DTYPE
    glu: bool = False
    residual: bool = False

    def weight(self, n: int) -> torch.Tensor:
        """A random one with n outputs."""
        return inputs.random(2 * n if self.glu else n, self.k, scale=self.k**-0.5)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is swept. splits: (n, k) -> those to stay."""

    models: list[str]
    kinds: list[str]
    rows: list[int]
    splits: dict[tuple[int, int], int]

    def shapes(self) -> list[Shape]:
        """Distinct products of the named models: those with an activation, then the others, the
        largest model first."""
        models = {m.name: m for m in (inputs.QWEN3_8B, inputs.QWEN3_06B, inputs.SMOLLM2, TINY)}
        found: dict[tuple[int, int, bool], Shape] = {}
        for model in (models[name] for name in self.models):
            rows, head_rows = ((3,), (3,)) if model is TINY else (ROWS, HEAD_ROWS)
            plain = [
                Shape(n, k, rows, residual=name in ("o", "down"))
                for name, n, k in model.linear_layers
            ]
            head = Shape(model.vocab_size, model.hidden, head_rows, torch.float32)
            glu = Shape(model.intermediate, model.hidden, rows, glu=True)
            for shape in (glu, *plain, head):
                found.setdefault((shape.n, shape.k, shape.glu), shape)
        ordered = sorted(found.values(), key=lambda shape: not shape.glu)
        return [s for s in ordered if ("glu" if s.glu else "plain") in self.kinds]

    def rows_of(self, shape: Shape) -> list[int]:
        """The row counts to sweep."""
        return [m for m in shape.rows if not self.rows or m in self.rows]

    def splits_of(self, shape: Shape) -> tuple[int, ...]:
        """Parts of K worth trying: where N alone does not fill the GPU."""
        if shape.glu or shape.n > 8192:
            return (1,)
        kept = self.splits.get((shape.n, shape.k))
        if kept is not None:
            return (kept,)
        return tuple(s for s in (1, 2, 4) if shape.k // s >= 512 or s == 1)


Job = tuple[Shape, int, int, FixedGemmTile]


def jobs(choice: Choice) -> list[Job]:
    """(shape, rows, splits, tile), all of one shape together."""
    return [
        (shape, m, splits, tile)
        for shape in choice.shapes()
        for m in choice.rows_of(shape)
        for splits in choice.splits_of(shape)
        for tile in candidates(m, splits, shape.glu)
    ]


def compile_part(part: int, parts: int, choice: Choice) -> None:
    """Run every parts-th configuration once, with few outputs."""
    workspace = new_gemm_workspace(inputs.DEVICE)
    seen = set()
    for shape, m, splits, tile in jobs(choice):
        key = (shape.k, shape.glu, shape.residual, m <= FEW_ROWS, splits, tile, shape.out_dtype)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts != part:
            continue
        x, weight = inputs.random(m, shape.k), shape.weight(512)
        out = torch.zeros(m, 512, dtype=shape.out_dtype, device=inputs.DEVICE)
        try:
            fixed_linear(
                out, x, weight, residual=out if shape.residual else None, workspace=workspace,
                pdl=True, tile=tile, splits=splits, glu=shape.glu,
            )  # fmt: skip
        except OutOfResources as error:
            print(f"{tile}: {error}")


def rivals(
    shape: Shape, x: torch.Tensor, weights: list[torch.Tensor]
) -> list[Callable[[], object]]:
    """What runs where fixed tiles do not: cuBLAS, and the activation in a launch of its own."""
    if not shape.glu:
        return [partial(linear, x, weight) for weight in weights]
    gate_up = torch.empty(len(x), 2 * shape.n, dtype=inputs.DTYPE, device=inputs.DEVICE)
    out = torch.empty(len(x), shape.n, dtype=inputs.DTYPE, device=inputs.DEVICE)

    def product_and_activation(weight: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=gate_up)
        silu_mul(out, gate_up, pdl=True)

    return [partial(product_and_activation, weight) for weight in weights]


class Sweep:
    """Times of every configuration, shape by shape."""

    def __init__(self, choice: Choice, seconds: float, limit: int | None) -> None:
        self._choice = choice
        self._end = time.monotonic() + seconds
        self._limit = limit
        self._workspace = new_gemm_workspace(inputs.DEVICE)

    def shape(self, shape: Shape) -> dict[str, Any] | None:
        """The shape's entry of the table, or None where time ran out."""
        count = num_sets(2 * shape.n * shape.k, limit=8)
        weights = [shape.weight(shape.n) for _ in range(count)]
        best: dict[int, dict[int, FixedGemmTile]] = {}
        costs: dict[int, float] = {}
        for m in self._choice.rows_of(shape):
            x = inputs.random(m, shape.k)
            base = time_calls(rivals(shape, x, weights), replays=5, min_calls=8)
            for splits in self._choice.splits_of(shape):
                found = self._rows(shape, splits, x, weights)
                if found is None:
                    return None
                best.setdefault(splits, {})[m] = found[1]
                costs[splits] = costs.get(splits, 0.0) + found[0] / base.p50_us
                record = {"n": shape.n, "k": shape.k, "glu": shape.glu, "m": m, "splits": splits}
                times = {"us": round(found[0], 2), "cublas_us": round(base.p50_us, 2)}
                print(json.dumps(record | times | {"tile": str(found[1])}), flush=True)
        splits = min(costs, key=lambda s: costs[s])
        tiles = {str(m_bucket(m)): asdict(tile) for m, tile in best[splits].items()}
        entry = {"n": shape.n, "k": shape.k}
        return entry | ({} if shape.glu else {"splits": splits}) | {"tiles": tiles}

    def _rows(
        self, shape: Shape, splits: int, x: torch.Tensor, weights: list[torch.Tensor]
    ) -> tuple[float, FixedGemmTile] | None:
        """Time and tile of the fastest whose bits are those of plain tiles; None: time ran out."""
        out = torch.empty(len(x), shape.n, dtype=shape.out_dtype, device=inputs.DEVICE)
        reference, plain = torch.empty_like(out), FixedGemmTile(64, 64, 64, 4, 4)
        residual = torch.randn_like(out) if shape.residual else None
        run = partial(fixed_linear, x=x, residual=residual, splits=splits, glu=shape.glu)
        run(out=reference, weight=weights[0], tile=plain)
        run = partial(run, out=out, workspace=self._workspace, pdl=True)
        timed = [(float("inf"), plain)]
        for tile in candidates(len(x), splits, shape.glu)[: self._limit]:
            if time.monotonic() > self._end:
                return None
            try:
                run(weight=weights[0], tile=tile)
                if not torch.equal(out, reference):
                    print(f"{shape} m {len(x)} splits {splits}: {tile} has other bits")
                    continue
                calls = [partial(run, weight=weight, tile=tile) for weight in weights]
                timed.append((time_calls(calls, replays=5, min_calls=8).p50_us, tile))
            except OutOfResources:
                continue
        return min(timed, key=lambda entry: entry[0])


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the table with new ones in their place; row counts that a new one lacks stay,
    unless their sums have other parts."""
    found = {(entry["n"], entry["k"]): entry for entry in old}
    for entry in new:
        key = (entry["n"], entry["k"])
        before = found.get(key, {})
        same = before.get("splits") == entry.get("splits")
        kept = before.get("tiles", {}) if same else {}
        tiles = sorted((kept | entry["tiles"]).items(), key=lambda item: int(item[0]))
        found[key] = entry | {"tiles": dict(tiles)}
    return list(found.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=TABLE_PATH)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-0.6b", "smollm2-135m"])
    parser.add_argument("--only", choices=("plain", "glu"))
    parser.add_argument("--rows", nargs="+", type=int, default=[], choices=ROWS)
    parser.add_argument("--keep-splits", action="store_true")
    parser.add_argument("--compile-part", default="")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--limit", type=int, help="tiles per row count")
    args = parser.parse_args()
    kept = read_table(TABLE_PATH).splits if args.rows or args.keep_splits else {}
    kinds = [args.only] if args.only else ["plain", "glu"]
    choice = Choice(args.models, kinds, args.rows, kept)
    if args.compile_part:
        part, parts = (int(x) for x in args.compile_part.split("/"))
        compile_part(part, parts, choice)
        return
    sweep = Sweep(choice, args.seconds, args.limit)
    plain: list[dict[str, Any]] = []
    glu: list[dict[str, Any]] = []
    for shape in choice.shapes():
        entry = sweep.shape(shape)
        if entry is None:
            print(f"stopped at {shape}")
            break
        (glu if shape.glu else plain).append(entry)
    old = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    table = {
        "made_by": "python -m bench.sweep_fixed_gemm",
        "shapes": merged(old["shapes"], plain),
        "glu": merged(old["glu"], glu),
    }
    args.write.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
