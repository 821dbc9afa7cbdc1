"""GEMV, small-M GEMM with fused neighbours, and the batch-invariant GEMM, against float64."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from bench.sweep_fixed_gemm import merged
from kernels.activation import silu_mul_ref
from kernels.deferred_norm import NextNorm
from kernels.fixed_gemm import fixed_linear, fixed_linear_ref
from kernels.fixed_tiles import (
    M_BUCKETS,
    SPLIT_UNIT,
    FixedGemmTile,
    default_tile,
    fixed_splits,
    m_bucket,
    read_table,
)
from kernels.held_gemm import HeldTile, held_tile
from kernels.product_tiles import SmallGemmTile, max_fused_rows, small_gemm_tile
from kernels.small_gemm import MAX_SMALL_M, small_linear, small_linear_ref
from kernels.split_k import EMPTY, new_gemm_workspace
from tests.kernels.util import DEVICE, DTYPES, IS_NATIVE, TOLERANCE, poisoned, randn, relative_error

FUSIONS = ["plain", "norm", "bias+residual", "norm+bias", "norm+glu"]


def arguments(m, n, k, fusion, dtype):
    x = randn(m, k, dtype=dtype)
    weight = randn(2 * n if "glu" in fusion else n, k, dtype=dtype, seed=1) * k**-0.5
    options = {}
    if "norm" in fusion:
        options |= {"norm_weight": randn(k, dtype=dtype, seed=2), "eps": 1e-5}
    if "bias" in fusion:
        options["bias"] = randn(n, dtype=dtype, seed=3)
    if "residual" in fusion:
        options["residual"] = randn(m, n, dtype=dtype, seed=4)
    if "glu" in fusion:
        options["glu"] = True
    return x, weight.to(dtype), options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 70, 96), (1, 33, 576), (3, 70, 96), (17, 48, 160), (64, 33, 64), (150, 20, 64)],
)
def test_small_linear_matches_float64(dtype, fusion, m, n, k) -> None:
    x, weight, options = arguments(m, n, k, fusion, dtype)
    out = poisoned(m, n, dtype=dtype)
    scratch = poisoned(m, k, dtype=dtype)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    assert small_linear(out, x, weight, workspace, **options, norm_scratch=scratch) is None
    expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("m", "split_k"), [(5, 2), (5, 3), (5, 4), (5, 5), (70, 2)])
def test_split_k_adds_every_part_once_and_leaves_the_workspace_empty(fusion, m, split_k) -> None:
    dtype = DTYPES[-1]
    x, weight, options = arguments(m, 70, 352, fusion, dtype)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    tile = SmallGemmTile(32, 64, split_k, 4, 2)
    for _ in range(2):
        out = poisoned(m, 70, dtype=dtype)
        scratch = poisoned(m, 352, dtype=dtype)
        small_linear(out, x, weight, workspace, **options, norm_scratch=scratch, tile=tile)
        expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert (workspace.partials == EMPTY).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (2, 70, 96, HeldTile(16, 1, 4)),
        (8, 33, 576, HeldTile(16, 1, 2)),
        (3, 41, 128, HeldTile(32, 1, 4)),
        (13, 48, 328, HeldTile(16, 3, 4)),
        (5, 40, 512, HeldTile(16, 2, 4)),
        (16, 16, 64, HeldTile(16, 1, 8)),
    ],
)
def test_weights_held_in_shared_memory_give_the_same_product(dtype, fusion, m, n, k, tile) -> None:
    x, weight, options = arguments(m, n, k, fusion, dtype)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
    for _ in range(2):
        out, scratch = poisoned(m, n, dtype=dtype), poisoned(m, k, dtype=dtype)
        small_linear(out, x, weight, workspace, **options, norm_scratch=scratch, tile=tile)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert (workspace.partials == EMPTY).all()


def test_weights_are_held_where_they_are_small_and_of_two_bytes() -> None:
    assert held_tile(8, 4096, 1024, 2, glu=False) == HeldTile(32, 1, 4)
    assert held_tile(8, 512, 896, 2, glu=False) is not None, "a shape that nobody measured"
    assert held_tile(9, 512, 896, 2, glu=False) is None
    assert held_tile(8, 960, 576, 2, glu=False) is None, "measured, and slower"
    assert held_tile(16, 576, 576, 2, glu=False) is not None
    for m, n, k, size in ((17, 4096, 1024, 2), (8, 4096, 1024, 4), (8, 4096, 4096, 2)):
        assert held_tile(m, n, k, size, glu=False) is None


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("m", "split_k"), [(2, 1), (5, 2), (17, 3), (64, 1)])
def test_small_linear_has_the_same_bits_by_descriptors(fusion, m, split_k) -> None:
    """K of 328 is no multiple of a tile, and 70 rows of the weight are not either."""
    dtype = torch.float16
    x, weight, options = arguments(m, 70, 328, fusion, dtype)
    expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    outputs = []
    for tma in (False, True):
        out, scratch = poisoned(m, 70, dtype=dtype), poisoned(m, 328, dtype=dtype)
        tile = SmallGemmTile(32, 64, split_k, 4, 3, tma=tma)
        small_linear(out, x, weight, workspace, **options, norm_scratch=scratch, tile=tile)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert (workspace.partials == EMPTY).all()
        outputs.append(out)
    assert torch.equal(*outputs)


@pytest.mark.timeout(60)
def test_a_part_that_is_no_number_arrives_as_any_other() -> None:
    """Whatever its bits: those of EMPTY would be waited for without end."""
    x, weight, _ = arguments(3, 40, 256, "plain", torch.float32)
    x.view(torch.int32)[1, :128] = EMPTY
    workspace = new_gemm_workspace(torch.device(DEVICE))
    out = poisoned(3, 40)
    small_linear(out, x, weight, workspace, tile=SmallGemmTile(16, 64, 2, 4, 2))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert (workspace.partials == EMPTY).all()


def test_small_linear_may_write_over_its_residual() -> None:
    dtype = DTYPES[-1]
    for m in (1, 5):
        x, weight, options = arguments(m, 70, 96, "bias+residual", dtype)
        expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
        stream = options["residual"]
        small_linear(stream, x, weight, new_gemm_workspace(torch.device(DEVICE)), **options)
        assert relative_error(stream, expected) < TOLERANCE[dtype]


def test_small_linear_writes_float32_logits() -> None:
    dtype = DTYPES[-1]
    for m in (1, 5):
        x, weight, options = arguments(m, 130, 96, "bias", dtype)
        out = poisoned(m, 130)
        small_linear(out, x, weight, new_gemm_workspace(torch.device(DEVICE)), **options)
        expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
        assert relative_error(out, expected) < TOLERANCE[dtype]


def test_small_linear_refuses_what_it_is_not_made_for() -> None:
    workspace = new_gemm_workspace(torch.device(DEVICE))
    x, weight, _ = arguments(257, 16, 16, "plain", torch.float32)
    with pytest.raises(ValueError, match="up to 256 rows"):
        small_linear(poisoned(65, 16), x, weight, workspace)
    x, weight, options = arguments(3, 16, 16, "norm", torch.float32)
    with pytest.raises(ValueError, match="norm_scratch is None"):
        small_linear(poisoned(3, 16), x, weight, workspace, **options)
    x, weight, _ = arguments(17, 16, 16, "plain", torch.float32)
    with pytest.raises(ValueError, match="up to 16 rows, x has 17"):
        small_linear(poisoned(17, 16), x, weight, workspace, tile=HeldTile(16, 1, 4))
    x, weight, _ = arguments(3, 16, 512, "plain", torch.float32)
    with pytest.raises(ValueError, match="fewer numbers than threads"):
        small_linear(poisoned(3, 16), x, weight, workspace, tile=HeldTile(16, 2, 8))
    x, weight, options = arguments(3, 33, 16, "plain", torch.float32)
    norm = NextNorm(poisoned(33), poisoned(3, 33), poisoned(3, 2), 1e-5)
    with pytest.raises(ValueError, match="2 columns for the product's 3 column tiles"):
        small_linear(poisoned(3, 33), x, weight, workspace, next_norm=norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 96), (65, 130, 72), (130, 33, 64)])
def test_fixed_linear_matches_float64(dtype, m, n, k) -> None:
    x, weight, options = arguments(m, n, k, "bias+residual", dtype)
    out = poisoned(m, n, dtype=dtype)
    fixed_linear(out, x, weight, **options)
    expected = fixed_linear_ref(x, weight, **options, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.usefixtures("row_by_row_dots")
def test_fixed_linear_gives_a_row_the_same_bits_whatever_m_is() -> None:
    """Row 0 alone and first of 5, 64, 65, 129 and 300; a row in the middle equals itself alone."""
    dtype = DTYPES[-1]
    sizes = [1, 5, 64, 65, 129, 300]
    x, weight, _ = arguments(300, 96, 160, "plain", dtype)
    x, weight = exactly_summed(x), exactly_summed(weight)
    outputs = []
    for m in sizes:
        out = poisoned(m, 96, dtype=torch.float32)
        fixed_linear(out, x[:m], weight)
        outputs.append(out)
    assert all(torch.equal(out[0], outputs[0][0]) for out in outputs)
    middle = poisoned(1, 96, dtype=torch.float32)
    fixed_linear(middle, x[128:129], weight)
    assert torch.equal(middle[0], outputs[-1][128])


def exactly_summed(matrix):
    """Rounded so that every sum of products is exact: the interpreter's matrix products add in an
    order of their own. (On a device the numbers stay: there the order is what is tested.)"""
    return matrix if IS_NATIVE else (matrix * 8).round() / 8


TILES = {
    "plain": FixedGemmTile(64, 32, 32, 4, 2),
    "parallel": FixedGemmTile(64, 32, 32, 4, 2, parallel=True),
    "descriptors": FixedGemmTile(64, 32, 32, 4, 2, tma=True),
    "parallel descriptors": FixedGemmTile(64, 32, 32, 4, 2, parallel=True, tma=True),
    "persistent": FixedGemmTile(64, 32, 32, 4, 2, persistent=True),
    "persistent descriptors": FixedGemmTile(64, 32, 32, 4, 2, persistent=True, tma=True),
    "wide": FixedGemmTile(128, 64, 32, 4, 2),
}


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_fixed_linear_has_the_same_bits_by_every_way_of_its_tiles(splits) -> None:
    """K of 328 is no multiple of a split; 3 splits leave the last one 72 columns."""
    dtype = torch.float16
    x, weight, options = arguments(70, 96, 328, "bias+residual", dtype)
    expected = fixed_linear_ref(x, weight, **options, dtype=torch.float64)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    outputs = {}
    for name, tile in TILES.items():
        out = outputs[name] = poisoned(70, 96, dtype=dtype)
        fixed_linear(out, x, weight, **options, workspace=workspace, tile=tile, splits=splits)
        assert relative_error(out, expected) < TOLERANCE[dtype], name
        assert (workspace.partials == EMPTY).all(), name
    assert all(torch.equal(out, outputs["plain"]) for out in outputs.values())
    out = poisoned(70, 96, dtype=dtype)  # no workspace: one part after the other
    fixed_linear(out, x, weight, **options, tile=TILES["parallel"], splits=splits)
    assert torch.equal(out, outputs["plain"])


@pytest.mark.parametrize("name", ["plain", "parallel", "persistent", "wide"])
def test_fixed_linear_may_write_over_its_residual(name) -> None:
    dtype, splits = DTYPES[-1], 1 if name == "persistent" else 2
    x, weight, options = arguments(70, 96, 328, "residual", dtype)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    expected = fixed_linear_ref(x, weight, **options, dtype=torch.float64)
    stream = options["residual"]
    fixed_linear(
        stream, x, weight, residual=stream, workspace=workspace, tile=TILES[name], splits=splits
    )
    assert relative_error(stream, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fusion", ["glu", "glu+residual"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 96), (65, 130, 72), (130, 33, 64)])
def test_fixed_linear_with_an_activation_matches_float64(dtype, fusion, m, n, k) -> None:
    x, weight, options = arguments(m, n, k, fusion, dtype)
    out = poisoned(m, n, dtype=dtype)
    fixed_linear(out, x, weight, **options)
    expected = fixed_linear_ref(x, weight, **options, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.usefixtures("row_by_row_dots")
def test_an_activation_gives_a_row_the_same_bits_whatever_m_is() -> None:
    """By the tiles that each number of rows gets, and at any place among the others."""
    x, weight, _ = arguments(300, 96, 160, "glu", DTYPES[-1])
    x, weight = exactly_summed(x), exactly_summed(weight)
    whole = poisoned(300, 96)
    fixed_linear(whole, x, weight, glu=True)
    for begin, end in [(0, 1), (0, 5), (64, 129), (128, 129), (0, 130), (299, 300)]:
        part = poisoned(end - begin, 96)
        fixed_linear(part, x[begin:end], weight, glu=True)
        assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("splits", [1, 3])
def test_an_activation_has_the_same_bits_by_every_way_of_its_tiles(splits) -> None:
    """Column tiles end inside the gate's rows and inside the up projection's: n of 88 is no
    multiple of theirs."""
    dtype = torch.float16
    x, weight, options = arguments(70, 88, 328, "glu+residual", dtype)
    expected = fixed_linear_ref(x, weight, **options, dtype=torch.float64)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    outputs = {}
    for name, tile in TILES.items():
        out = outputs[name] = poisoned(70, 88, dtype=dtype)
        fixed_linear(out, x, weight, **options, workspace=workspace, tile=tile, splits=splits)
        assert relative_error(out, expected) < TOLERANCE[dtype], name
    assert all(torch.equal(out, outputs["plain"]) for out in outputs.values())
    is_left = "a tile of two sums has no room for its partial sums"
    assert (workspace.partials == EMPTY).all(), is_left


def test_an_activation_is_rounded_once() -> None:
    """Gates and ups stay float32 until the product, whatever the type of x is."""
    dtype = torch.float16
    x, weight, _ = arguments(40, 48, 64, "glu", dtype)
    out, rounded_twice = poisoned(40, 48), poisoned(40, 96, dtype=dtype)
    fixed_linear(out, x, weight, glu=True)
    expected = fixed_linear_ref(x, weight, glu=True, dtype=torch.float64)
    assert relative_error(out, expected) < 1e-5
    fixed_linear(rounded_twice, x, weight)
    assert relative_error(silu_mul_ref(rounded_twice.float()), expected) > 1e-4


def test_an_activation_and_a_bias_do_not_go_together() -> None:
    x, weight, _ = arguments(3, 16, 16, "glu", torch.float32)
    with pytest.raises(ValueError, match="no bias with glu"):
        fixed_linear(poisoned(3, 16), x, weight, bias=torch.zeros(16), glu=True)


def test_fixed_gemm_tiles_come_from_the_sweeps_file(tmp_path) -> None:
    path = tmp_path / "tiles.json"
    assert read_table(path).tiles == {}
    tile = FixedGemmTile(64, 128, 64, 4, 5, parallel=True)
    shape = {"n": 96, "k": 328, "splits": 2, "tiles": {"64": asdict(tile)}}
    glu = {"n": 48, "k": 328, "tiles": {"8192": asdict(tile)}}
    path.write_text(json.dumps({"shapes": [shape], "glu": [glu]}))
    table = read_table(path)
    assert table.glu == {(8192, 48, 328): tile}
    assert table.splits == {(96, 328): 2}
    assert table.tiles == {(64, 96, 328): tile}
    path.write_text('{"shapes": [{"n": 1}]}')
    with pytest.raises(ValueError, match="no table"):
        read_table(path)


def test_a_sweep_of_some_rows_keeps_the_tiles_of_the_others_unless_sums_have_other_parts() -> None:
    old = [{"n": 96, "k": 328, "splits": 2, "tiles": {"16": 1, "2048": 2}}, {"n": 1, "k": 2}]
    new = {"n": 96, "k": 328, "splits": 2, "tiles": {"64": 3, "2048": 4}}
    assert merged(old, [new])[0]["tiles"] == {"16": 1, "64": 3, "2048": 4}
    assert merged(old, [new])[1:] == old[1:]
    assert merged(old, [new | {"splits": 1}])[0]["tiles"] == new["tiles"]
    assert merged([], [new]) == [new]


def test_every_default_tile_of_a_split_shape_sums_the_same_parts() -> None:
    for n, k in [(4096, 4096), (4096, 12288), (1024, 3072), (24576, 4096), (576, 1536)]:
        for m in (1, 64, 100, 256, 2048, 8192, 20000):
            splits = fixed_splits(n, k, torch.bfloat16)
            part = -(-k // (splits * SPLIT_UNIT)) * SPLIT_UNIT
            assert splits == 1 or part % default_tile(m, n, k, torch.bfloat16).block_k == 0
            assert m_bucket(m) >= m or m_bucket(m) == M_BUCKETS[-1]


def test_tiles_of_wide_models_without_a_line_of_their_own_fill_the_processors() -> None:
    for n, k in [(4096, 4096), (6144, 4096), (4096, 12288)]:  # measured: the rule says the same
        assert small_gemm_tile(64, n, k + 8) == small_gemm_tile(64, n, k)
    for n in (1024, 2560, 3584, 5120, 7168):
        tile = small_gemm_tile(17, n, 5120)
        assert 60 <= -(-n // tile.block_n) * tile.split_k <= 132
    assert small_gemm_tile(64, 14336, 4096) == small_gemm_tile(64, 12288, 4096)
    assert small_gemm_tile(33, 4096, 12288) != small_gemm_tile(32, 4096, 12288)
    assert small_gemm_tile(16, 4096, 14336).block_n == 16, "few rows are little to read"


def test_rows_beyond_64_have_tiles_of_their_own_or_wide_ones() -> None:
    assert small_gemm_tile(65, 576, 1536) == small_gemm_tile(128, 576, 1536)
    assert small_gemm_tile(129, 576, 1536) == small_gemm_tile(256, 576, 1536)
    assert len({small_gemm_tile(m, 576, 1536) for m in (64, 128, 256)}) == 3
    assert small_gemm_tile(256, 4096, 1024) == small_gemm_tile(128, 4096, 1024)
    assert small_gemm_tile(256, 576, 576) == small_gemm_tile(64, 576, 576), "tried, none is faster"
    assert small_gemm_tile(65, 640, 640).block_n == 64 > small_gemm_tile(64, 640, 640).block_n
    most = [max_fused_rows(hidden, torch.bfloat16) for hidden in (576, 1024, 2048, 4096)]
    assert most == [256, 128, 64, 64]
    assert {max_fused_rows(576, dtype) for dtype in (torch.float16, torch.float32)} == {64}
    assert MAX_SMALL_M == 256
