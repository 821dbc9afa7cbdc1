"""Decode steps that differ from what the engine takes by itself, captured and timed for
`bench.step_search`.

Nothing global is changed: a variant is a captured step with an attention plan, a share of shared
memory and products of its own, put into the runner's cache in the place of the one for that number
of rows. That is private to the runner, and this module alone reaches into it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from bench.sweep_gemm import gemm_tiles, held_tiles
from engine.gpu.attention_plans import MAX_SLOTS, AttentionPlans, Plans, num_processors
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.graph_cache import decode_sizes
from engine.gpu.linear import Linears
from engine.gpu.row_tables import SampleKind
from engine.gpu.runner import GpuRunner
from engine.loop import EngineLoop
from engine.model.spec import ModelSpec
from kernels.decode_plan import new_decode_plan
from kernels.deferred_norm import ScaledInput
from kernels.held_gemm import HeldTile
from kernels.product_tiles import max_fused_rows
from kernels.small_gemm import ProductTile, product_tile, small_linear
from kernels.tiles import DecodeTile, decode_tile, shared_percent
from ops.bench.load import Workload
from ops.bench.profile import started

BASE = "base"
MAX_NUM_SEQS = 256

ProductShape = tuple[int, int]
"""Outputs and length of a product, as in the tables of kernels/tiles.py."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How decode steps of one number of rows are launched. share: per cent of a processor's fast
    memory that is shared memory, None: as the driver likes. products: tiles of small_linear."""

    attention: DecodeTile
    share: int | None
    products: Mapping[ProductShape, ProductTile] = field(default_factory=dict)

    def with_product(self, shape: ProductShape, tile: ProductTile) -> Variant:
        """The same with another tile for one product."""
        return replace(self, products={**self.products, shape: tile})

    def as_dict(self) -> dict[str, Any]:
        """For a result line."""
        products = {f"{n}x{k}": str(tile) for (n, k), tile in self.products.items()}
        return {"attention": str(self.attention), "share": self.share, "products": products}


Choice = tuple[str, Callable[[Variant], Variant]]
"""A label, and what it changes."""


class VariantRefusedError(Exception):
    """A variant that does not compile or fit; nothing has run."""


def attention_tile(text: str) -> DecodeTile:
    """`tokens,warps,stages,programs[,tma]` -> a tile with the usual groups; ValueError."""
    numbers, is_tma = text.removesuffix(",tma").split(","), text.endswith(",tma")
    if len(numbers) != 4 or not all(part.isdecimal() and int(part) for part in numbers):
        raise ValueError(f"attention tile {text!r}: use tokens,warps,stages,programs[,tma]")
    tokens, warps, stages, programs = map(int, numbers)
    if any(number & (number - 1) for number in (tokens, warps)):
        raise ValueError(f"attention tile {text!r}: tokens and warps are powers of two")
    return DecodeTile(tokens, warps, stages, programs, tma=is_tma)


def share(text: str) -> int | None:
    """A number of per cent, or `driver` for None; ValueError."""
    if text == "driver":
        return None
    if not text.isdecimal() or int(text) > 100:
        raise ValueError(f"share {text!r}: use a number from 0 to 100, or driver")
    return int(text)


def graph_size(rows: int) -> int:
    """Rows of the captured step that takes so many; ValueError."""
    if not 1 <= rows <= MAX_NUM_SEQS:
        raise ValueError(f"rows {rows}: use 1 to {MAX_NUM_SEQS}")
    return next(size for size in decode_sizes(MAX_NUM_SEQS) if size >= rows)


def base_variant(spec: ModelSpec, size: int, dtype: torch.dtype = torch.bfloat16) -> Variant:
    """What the engine takes by itself."""
    products = {}
    if 1 < size <= max_fused_rows(spec.hidden_size, dtype):
        for name, (n, k) in product_shapes(spec).items():
            products[n, k] = product_tile(size, n, k, dtype.itemsize, name == "gate_up")
    return Variant(
        decode_tile(spec.head_dim, dtype, size, hidden_size=spec.hidden_size),
        shared_percent(size, spec.hidden_size, spec.head_dim),
        products,
    )


def product_shapes(spec: ModelSpec) -> dict[str, ProductShape]:
    """Of one layer, in order, and the head's."""
    return {
        "qkv": (spec.qkv_size, spec.hidden_size),
        "o": (spec.hidden_size, spec.q_size),
        "gate_up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }


def choices(
    base: Variant,
    spec: ModelSpec,
    rows: int,
    tiles: list[DecodeTile],
    shares: list[int | None],
    with_products: bool,
) -> list[list[Choice]]:
    """What to try, one choice after the other. ValueError: products of so many rows have no tiles
    of small_linear."""
    found: list[list[Choice]] = [
        [(f"attention={_short(tile)}", partial(replace, attention=tile)) for tile in tiles],
        [
            (f"share={'driver' if percent is None else percent}", partial(replace, share=percent))
            for percent in shares
        ],
    ]
    if not with_products:
        return found
    if not base.products:
        raise ValueError(
            f"rows {rows}: products have tiles of small_linear for 2 to"
            f" {max_fused_rows(spec.hidden_size, torch.bfloat16)} rows"
        )
    for name, (n, k) in product_shapes(spec).items():
        shape = (graph_size(rows), n, k, name == "gate_up")
        candidates: list[ProductTile] = [*held_tiles(*shape), *gemm_tiles(*shape)]
        found.append(
            [
                (f"{name}={_short(tile)}", partial(Variant.with_product, shape=(n, k), tile=tile))
                for tile in candidates
            ]
        )
    return found


def _short(tile: DecodeTile | ProductTile) -> str:
    """A tile as the command line writes it."""
    fields = asdict(tile)
    is_tma = fields.pop("tma", False)
    for name in ("groups", "max_registers"):
        fields.pop(name, None)
    kind = "held," if isinstance(tile, HeldTile) else ""
    return kind + ",".join(map(str, fields.values())) + (",tma" if is_tma else "")


@dataclass(frozen=True, slots=True)
class TiledLinears(Linears):
    """Products whose tiles are given. tiles: by (outputs, length); others are from the table."""

    tiles: Mapping[ProductShape, ProductTile] = field(default_factory=dict)

    def fused(
        self, out: torch.Tensor, x: torch.Tensor | ScaledInput, weight: torch.Tensor, **options: Any
    ) -> ScaledInput | None:
        """See `Linears.fused`."""
        tile = self.tiles.get((out.shape[1], weight.shape[1]))
        return small_linear(out, x, weight, self.workspace, tile=tile, **options)


class VariantGraph(DecodeGraph):
    """A captured decode step that asks for a given share of shared memory."""

    def __init__(self, percent: int | None, *parts: Any) -> None:
        super().__init__(*parts)
        self._percent = percent

    @property
    def shared_percent(self) -> int | None:
        """See `CapturedStep`."""
        return self._percent


class StepTimer:
    """Times steps of a loaded engine in which all requests of `load` decode: after `settle` steps,
    `rounds` times so many steps."""

    def __init__(
        self, loop: EngineLoop, load: Workload, rounds: int = 3, steps: int = 8, settle: int = 5
    ) -> None:
        if not isinstance(loop.runner, GpuRunner):
            raise TypeError(f"{type(loop.runner).__name__} has no captured steps: use a GPU")
        self._loop = loop
        self._load = load
        self._rounds, self._steps, self._settle = rounds, steps, settle
        self._cache = loop.runner._graphs
        sizes = decode_sizes(loop.runner.info.max_num_seqs)
        self._size = next(size for size in sizes if size >= load.num_requests)
        # Captures share one memory pool, which torch frees with its last graph: keep them all.
        self._kept: list[object] = []

    def measure(self, variant: Variant) -> list[float]:
        """Microseconds a step, of each round; every variant begins with the same requests. Raises
        VariantRefusedError, after which the engine is as before."""
        self._loop.drop_runs()
        key = ("decode", self._size, 0, SampleKind.PLAIN)
        graph = self._captured(variant)  # outside of a step, which could not be undone
        self._kept.append(self._cache._graphs.get(key))
        self._cache._graphs[key] = graph
        recorder = started(self._loop, self._load)
        for _ in range(self._settle):
            self._loop.step(recorder, recorder)
        rounds = []
        for _ in range(self._rounds):
            began = time.perf_counter()
            for _ in range(self._steps):
                self._loop.step(recorder, recorder)
            rounds.append((time.perf_counter() - began) * 1e6 / self._steps)
        return rounds

    def _captured(self, variant: Variant) -> VariantGraph:
        decoder, tables, buffers, block_size, slots = self._cache._parts
        tiled = copy.copy(decoder)  # the same weights and cache
        own = decoder.linears
        tiled.linears = TiledLinears(
            own.deterministic, own.workspace, own.max_fused_rows, variant.products
        )
        plans = self._plans(variant.attention, buffers.attention.of(self._size))
        buffers = replace(buffers, attention=AttentionPlans(((self._size, plans),)))
        graph = VariantGraph(
            variant.share, self._size, SampleKind.PLAIN, tiled, tables, buffers, block_size, slots
        )
        try:
            graph.capture(self._cache.spare, self._cache._site)
        except (TritonError, ValueError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was launched of the step writes to shared buffers
            raise VariantRefusedError(_reason(error)) from error
        return graph

    def _plans(self, tile: DecodeTile, own: Plans) -> Plans:
        """Work lists for a tile, with the workspaces that are there."""
        found = {}
        for window, (plan, workspace) in own.items():
            device = plan.items.device
            programs = num_processors(device) * tile.programs_per_sm
            new = new_decode_plan(
                self._size, tile, programs, MAX_SLOTS, device, in_order=plan.in_order
            )
            found[window] = (new, workspace)
        return found


def is_refusal(error: Exception) -> bool:
    """Whether a compiler or a launcher has refused a tile; otherwise something is broken."""
    if isinstance(error, RuntimeError):  # how the compiler says that one of its passes failed
        return "PassManager" in str(error)
    return isinstance(error, TritonError | ValueError)


def _reason(error: Exception) -> str:
    """The kind of error and its last line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"
