"""The search for the fastest decode step: arguments, variants, what is kept; no engine."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from triton.runtime.errors import OutOfResources

from bench.step_search import Search, checked, labels, parser
from bench.step_variants import (
    StepTimer,
    Variant,
    VariantRefusedError,
    attention_tile,
    base_variant,
    choices,
    graph_size,
    is_refusal,
    product_shapes,
    share,
)
from engine.loader import read_spec
from kernels.held_gemm import HeldTile
from kernels.product_tiles import SmallGemmTile, small_gemm_tile
from kernels.tiles import DecodeGroups, DecodeTile
from ops.bench.load import Workload
from ops.bench.shapes import write_shape

BASE = Variant(DecodeTile(64, 4, 4, 2), 50, {(8, 16): SmallGemmTile(16, 16, 1, 2, 2)})


@pytest.fixture
def spec(tmp_path):
    return read_spec(write_shape("smollm2-135m", tmp_path))


def arguments(*extra: str) -> argparse.Namespace:
    return parser().parse_args(["smollm2-135m", "--rows", "8", *extra])


def test_an_attention_tile_is_read() -> None:
    assert attention_tile("64,4,3,2,tma") == DecodeTile(64, 4, 3, 2, tma=True)
    assert attention_tile("128,8,1,1") == DecodeTile(128, 8, 1, 1)


@pytest.mark.parametrize(
    "text", ["", "64", "64,4,3", "64,4,3,2,1", "64,4,3,x", "60,4,3,2", "64,3,3,2", "64,4,0,2,tma"]
)
def test_what_is_no_attention_tile_is_refused(text, capsys) -> None:
    with pytest.raises(ValueError, match="attention tile"):
        attention_tile(text)
    with pytest.raises(SystemExit):
        arguments("--attention", text)
    assert f"attention tile '{text}'" in capsys.readouterr().err


def test_a_share_is_per_cent_or_left_to_the_driver() -> None:
    assert arguments("--share", "0", "100", "driver").share == [0, 100, None]
    for text in ("101", "-1", "half"):
        with pytest.raises(ValueError, match="0 to 100, or driver"):
            share(text)


def test_rows_round_up_to_a_captured_size() -> None:
    assert [graph_size(rows) for rows in (1, 3, 8, 9, 250)] == [1, 4, 8, 16, 256]
    for rows in (0, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            graph_size(rows)


def test_attention_tiles_keep_the_groups_of_the_number_of_rows(spec) -> None:
    args = parser().parse_args(["smollm2-135m", "--rows", "256", "--attention", "64,4,5,3"])
    base, found = checked(args, spec)
    assert base.attention.groups == DecodeGroups(4, 8, 16)
    label, change = found[0][0]
    assert label == "attention=64,4,5,3"
    assert change(base).attention == DecodeTile(64, 4, 5, 3, groups=DecodeGroups(4, 8, 16))


def test_the_base_is_what_the_tables_say(spec) -> None:
    base = base_variant(spec, 8)
    assert base.share == 50
    assert base.attention == DecodeTile(64, 4, 4, 2, tma=True)
    assert base.products[960, 576] == small_gemm_tile(8, 960, 576)
    assert base.products[576, 1536] == HeldTile(16, 2, 4), "what the engine takes"
    assert set(base.products) == set(product_shapes(spec).values())
    assert base_variant(spec, 1).products == {}, "one row has products of its own"
    assert base_variant(spec, 256).products[960, 576] == small_gemm_tile(256, 960, 576)


def test_a_base_whose_products_are_cublas_s_has_no_tiles_for_them(tmp_path) -> None:
    wide = read_spec(write_shape("qwen3-8b", tmp_path))
    assert base_variant(wide, 80).products == {}


def test_each_product_is_varied_by_itself(spec) -> None:
    base, found = checked(arguments("--small-gemm"), spec)
    groups = [[label.split("=")[0] for label, _ in choice] for choice in found]
    names = ["qkv", "o", "gate_up", "down", "head"]
    assert [set(group) for group in groups if group] == [{name} for name in names]
    assert any(label.startswith("down=held,") for label in labels(found))
    for _, change in found[2]:
        changed = change(base)
        others = {key: tile for key, tile in changed.products.items() if key != (960, 576)}
        assert others == {k: tile for k, tile in base.products.items() if k != (960, 576)}
        assert (changed.attention, changed.share) == (base.attention, base.share)
    assert len(set(labels(found))) == len(list(labels(found)))


def test_products_of_many_rows_are_tried_by_descriptors_too(tmp_path) -> None:
    wide = read_spec(write_shape("qwen3-8b", tmp_path))
    args = parser().parse_args(["qwen3-8b", "--rows", "64", "--small-gemm"])
    base, found = checked(args, wide)
    assert base.products[6144, 4096] == small_gemm_tile(64, 6144, 4096)
    assert any(label.endswith("tma") for label in labels(found))
    assert len(set(labels(found))) == len(list(labels(found)))


def test_nothing_to_try_and_products_without_tiles_are_refused(spec) -> None:
    with pytest.raises(ValueError, match="nothing to try"):
        checked(arguments(), spec)
    with pytest.raises(ValueError, match="rows 1: products"):
        choices(base_variant(spec, 1), spec, 1, [], [], with_products=True)


def test_the_search_keeps_the_best_and_measures_the_base_again() -> None:
    seen = []

    def measure(variant: Variant) -> list[float]:
        us = {50: 100.0, 60: 90.0, 70: 99.0}[variant.share] - 20.0 * variant.attention.tma
        return [us + 500.0, us, us - 0.1]  # one round was disturbed

    search = Search(measure, lambda label, variant, _: seen.append((label, variant)))
    tma = replace(BASE.attention, tma=True)
    best = search.run(
        BASE,
        [
            [(f"share={n}", lambda v, n=n: replace(v, share=n)) for n in (60, 70)],
            [("tma", lambda v: replace(v, attention=tma))],
        ],
    )
    assert best == replace(BASE, share=60, attention=tma)
    labels_seen = [label for label, _ in seen]
    assert labels_seen == ["base", "share=60", "share=70", "tma", "base_again", "best"]
    assert dict(seen)["tma"].share == 60, "a later choice begins with the best so far"
    assert dict(seen)["base_again"] == BASE


def test_a_gain_within_the_noise_changes_nothing() -> None:
    search = Search(lambda v: [100.0 if v.share == 50 else 99.8], lambda *_: None)
    assert search.run(BASE, [[("share=60", lambda v: replace(v, share=60))]]) == BASE


def test_a_variant_that_is_refused_is_named_and_passed_over(capsys) -> None:
    def measure(variant: Variant) -> list[float]:
        if variant.share == 60:
            raise VariantRefusedError("OutOfResources: shared memory")
        return [100.0 - (variant.share or 0)]

    search = Search(measure, lambda *_: None)
    shares = [(f"share={n}", lambda v, n=n: replace(v, share=n)) for n in (60, 70, 50)]
    assert search.run(BASE, [shares]).share == 70
    assert search.skipped == ["share=60"]
    assert "skipped share=60: OutOfResources" in capsys.readouterr().out


def test_no_variant_begins_when_the_time_is_spent() -> None:
    measured = []

    def measure(variant: Variant) -> list[float]:
        measured.append(variant)
        return [1.0]

    search = Search(measure, lambda *_: None, is_over=lambda: True)
    assert search.run(BASE, [[("share=60", lambda v: replace(v, share=60))]]) == BASE
    assert measured == [BASE, BASE]
    assert search.skipped == ["share=60"]


def test_what_a_compiler_refuses_is_told_from_what_is_broken() -> None:
    assert is_refusal(OutOfResources(300_000, 232_448, "shared memory"))
    assert is_refusal(ValueError("NextNorm.squares has 4 columns"))
    assert is_refusal(RuntimeError("PassManager::run failed"))
    assert not is_refusal(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_runner_without_captured_steps_is_refused() -> None:
    class Loop:
        runner = object()

    with pytest.raises(TypeError, match="no captured steps"):
        StepTimer(Loop(), Workload(1, 8, 8, 100))
