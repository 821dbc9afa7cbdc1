"""Variants of decode steps take the place of the engine's own; a refused one changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.step_variants import (
    StepTimer,
    Variant,
    VariantGraph,
    VariantRefusedError,
    base_variant,
    product_shapes,
)
from engine.gpu import attention_plans
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from kernels import product_tiles as product_tables
from kernels import tiles as tables
from kernels.product_tiles import SmallGemmTile
from ops.bench.load import Workload
from tests.kernels.gpu_kit import VOCAB, interpret_graphs, make_runner

INPUT_LEN = 20


@pytest.fixture
def timer(monkeypatch, tmp_path) -> StepTimer:
    """Of two rows, whose products are fused."""
    interpret_graphs(monkeypatch)
    runner = make_runner(tmp_path, deterministic=False)
    loop = EngineLoop(runner, Scheduler(runner.info, False))
    return StepTimer(loop, Workload(2, INPUT_LEN, 90, VOCAB), rounds=2, steps=2, settle=1)


def graph_of(timer: StepTimer) -> VariantGraph:
    return timer._cache._graphs["decode", 2, 0, 0]


def base_of(timer: StepTimer) -> Variant:
    return base_variant(timer._loop.runner._packed._decoder.spec, 2, torch.float32)


def lengths(timer: StepTimer) -> list[int]:
    rows = timer._loop.scheduler.rows
    return sorted(int(rows.computed[row]) for row in rows.row_of.values())


def test_every_variant_sees_the_same_lengths_and_makes_the_same_tokens(timer) -> None:
    base = base_of(timer)
    spec = timer._loop.runner._packed._decoder.spec
    other = replace(base, share=40, attention=replace(base.attention, num_stages=1))
    other = other.with_product(product_shapes(spec)["o"], SmallGemmTile(16, 16, 2, 4, 1))
    table = timer._loop.runner._tables.token_table
    seen = []
    for variant in (base, other, base):
        rounds = timer.measure(variant)
        assert len(rounds) == 2
        assert min(rounds) > 0
        graph = graph_of(timer)
        plan, _ = graph._buffers.attention.of(2)[0]
        assert plan.tile == variant.attention
        assert graph.shared_percent == variant.share
        assert graph._decoder.linears.tiles == variant.products
        # Which row is whose may differ.
        seen.append((lengths(timer), sorted(table[:2, : min(lengths(timer))].tolist())))
    assert seen[0] == seen[1] == seen[2]
    assert min(seen[0][0]) > INPUT_LEN + 4, "the rows have decoded"
    assert len({id(graph) for graph in timer._kept}) == 3, "what was captured before is kept"


def test_the_tile_of_a_product_is_the_one_that_runs(timer, monkeypatch) -> None:
    base, seen = base_of(timer), []
    spec = timer._loop.runner._packed._decoder.spec
    tile = SmallGemmTile(16, 32, 1, 2, 1)
    for index, shape in enumerate(product_shapes(spec).values()):
        base = base.with_product(shape, replace(tile, prefetch_tiles=1 << index))
    from bench import step_variants

    original = step_variants.small_linear

    def noted(*args, tile=None, **options):
        seen.append(tile)
        return original(*args, tile=tile, **options)

    monkeypatch.setattr(step_variants, "small_linear", noted)
    timer._captured(base)
    assert {t.prefetch_tiles for t in seen if t} == {
        t.prefetch_tiles for t in base.products.values()
    }
    assert None not in seen


def test_a_refused_variant_leaves_the_engine_as_it_was(timer) -> None:
    base = base_of(timer)
    timer.measure(base)
    before, length = graph_of(timer), lengths(timer)
    hidden = timer._loop.runner._packed._decoder.spec.hidden_size
    too_many = base.with_product((hidden, hidden), SmallGemmTile(1, 16, 1, 4, 1))
    with pytest.raises(VariantRefusedError, match=r"ValueError: NextNorm\.squares has"):
        timer.measure(too_many)
    assert graph_of(timer) is before
    timer._loop.scheduler.check_integrity()
    timer.measure(base)
    assert lengths(timer) == length
    timer._loop.drop_runs()


def test_nothing_that_is_global_is_changed(timer) -> None:
    before = (dict(tables._DECODE_TILES), dict(product_tables._SMALL_GEMM_TILES))
    own = timer._loop.runner._buffers.attention
    timer.measure(replace(base_of(timer), share=30))
    assert (dict(tables._DECODE_TILES), dict(product_tables._SMALL_GEMM_TILES)) == before
    assert timer._loop.runner._buffers.attention is own
    assert isinstance(own, attention_plans.AttentionPlans)
