"""A norm in the ends of the products around it, against float64 and against a launch of its own."""

from __future__ import annotations

import pytest
import torch

from kernels.deferred_norm import NextNorm, ScaledInput, new_squares
from kernels.norm import rms_norm_ref
from kernels.product_tiles import SmallGemmTile, small_gemm_tile
from kernels.small_gemm import small_linear, small_linear_ref
from kernels.split_k import EMPTY, new_gemm_workspace
from tests.kernels.util import (
    DEVICE,
    DTYPES,
    IS_NATIVE,
    TOLERANCE,
    poisoned,
    randn,
    relative_error,
)

EPS = 1e-5
PADDING = 3
"""Rows behind those of a call, in its buffers."""


def product(m, n, k, fusion, dtype):
    """x, weight and the rest of a call; outputs are of order one."""
    weight = (randn(2 * n if "glu" in fusion else n, k, seed=1) * k**-0.5).to(dtype)
    options = {"glu": True} if "glu" in fusion else {}
    if "bias" in fusion:
        options["bias"] = randn(n, dtype=dtype, seed=3)
    if "residual" in fusion:
        options["residual"] = randn(m, n, dtype=dtype, seed=4)
    return randn(m, k, dtype=dtype), weight, options


class Producer:
    """A product before a norm, with poison in all that it may write and behind it."""

    def __init__(self, m, n, dtype) -> None:
        self.m = m
        self.out = poisoned(m + PADDING, n, dtype=dtype)
        self.scaled = poisoned(m + PADDING, n, dtype=dtype)
        self.squares = new_squares(m + PADDING, n, torch.device(DEVICE)).fill_(float("nan"))
        self.weight = randn(n, dtype=dtype, seed=5)

    def run(self, x, weight, workspace, tile=None, **options) -> ScaledInput:
        norm = NextNorm(self.weight, self.scaled[: self.m], self.squares[: self.m], EPS)
        out = self.out[: self.m]
        found = small_linear(out, x, weight, workspace, **options, next_norm=norm, tile=tile)
        assert found is not None
        return found

    def written(self) -> tuple[torch.Tensor, ...]:
        return self.out.clone(), self.scaled.clone(), self.squares.clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fusion", ["plain", "bias+residual", "glu"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 70, 96), (3, 71, 96), (17, 48, 160), (64, 33, 64), (130, 20, 64)]
)
def test_a_product_leaves_its_outputs_times_the_weight_and_their_squares(
    dtype, fusion, m, n, k
) -> None:
    x, weight, options = product(m, n, k, fusion, dtype)
    producer = Producer(m, n, dtype)
    found = producer.run(x, weight, new_gemm_workspace(torch.device(DEVICE)), **options)
    out, scaled, squares = producer.written()
    expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
    assert relative_error(out[:m], expected) < TOLERANCE[dtype]
    # Of the rounded outputs, which are what the residual stream holds.
    assert torch.equal(scaled[:m], (out[:m].float() * producer.weight.float()).to(dtype))
    assert relative_error(found.squares.sum(1), out[:m].double().square().sum(1)) < 1e-6
    num_tiles = found.squares.shape[1]
    columns = small_gemm_tile(m, n, k, dtype.itemsize).block_n
    assert num_tiles == -(-n // columns)
    assert squares[:m, num_tiles:].isnan().all()
    assert all(buffer[m:].isnan().all() for buffer in (out, scaled, squares))


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("split_k", [2, 3])
@pytest.mark.parametrize("m", [5, 20, 70])
def test_the_last_part_of_k_leaves_them_once_and_the_same_in_every_run(m, split_k, tma) -> None:
    dtype, tile = DTYPES[-1], SmallGemmTile(32, 64, split_k, 4, 2, tma=tma)
    x, weight, options = product(m, 70, 352, "residual", dtype)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    producer = Producer(m, 70, dtype)
    found = producer.run(x, weight, workspace, tile, **options)
    assert found.squares.shape == (m, 3)
    assert (workspace.partials == EMPTY).all()
    first = producer.written()
    expected = small_linear_ref(x, weight, **options, dtype=torch.float64)
    assert relative_error(found.squares.sum(1), expected.square().sum(1)) < TOLERANCE[dtype]
    for _ in range(2):
        producer.run(x, weight, workspace, tile, **options)
        for again, before in zip(producer.written(), first, strict=True):
            torch.testing.assert_close(again, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fusion", ["plain", "bias+residual", "glu"])
@pytest.mark.parametrize(
    ("m", "hidden", "n"),
    [
        (1, 40, 70),
        (3, 71, 33),
        (5, 2100, 33),  # 132 tiles: more than are added at a time for up to 16 rows
        (33, 590, 70),  # 37 tiles: more than that for more rows
        (64, 96, 33),
        (130, 48, 20),  # three tiles of rows
    ],
)
def test_two_products_around_a_norm_match_float64(dtype, fusion, m, hidden, n) -> None:
    workspace = new_gemm_workspace(torch.device(DEVICE))
    x, weight, _ = product(m, hidden, 48, "plain", dtype)
    stream = randn(m, hidden, dtype=dtype, seed=6)
    producer = Producer(m, hidden, dtype)
    found = producer.run(x, weight, workspace, residual=stream)
    _, behind, options = product(m, n, hidden, fusion, dtype)
    out = poisoned(m, n, dtype=dtype)
    assert small_linear(out, found, behind, workspace, **options) is None
    norm = {"norm_weight": producer.weight, "eps": EPS}
    # From the stream as it was rounded: what the next layers add to.
    expected = small_linear_ref(producer.out[:m], behind, **options, **norm, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("split_k", [1, 2])
def test_a_norm_in_the_end_of_a_split_product_applies_to_the_whole_sum(split_k, tma) -> None:
    dtype, m, hidden = DTYPES[-1], 6, 200
    workspace = new_gemm_workspace(torch.device(DEVICE))
    x, weight, _ = product(m, hidden, 48, "plain", dtype)
    producer = Producer(m, hidden, dtype)
    found = producer.run(x, weight, workspace)
    _, behind, options = product(m, 70, hidden, "bias", dtype)
    tile = SmallGemmTile(32, 64, split_k, 4, 2, tma=tma)
    outputs = [poisoned(m, 70) for _ in range(3)]
    for out in outputs:
        small_linear(out, found, behind, workspace, **options, tile=tile)
        assert torch.equal(out, outputs[0])
    normed = rms_norm_ref(producer.out[:m].float(), producer.weight.float(), EPS)
    expected = small_linear_ref(normed, behind, **options, dtype=torch.float64)
    assert relative_error(outputs[0], expected) < TOLERANCE[dtype]


def test_tiny_and_large_rows_side_by_side_keep_their_own_factors() -> None:
    """Rows of very unlike size, and one of zeros, whose factor is 1 / sqrt(eps)."""
    workspace = new_gemm_workspace(torch.device(DEVICE))
    x, weight, _ = product(4, 48, 48, "plain", torch.float32)
    x *= torch.tensor([1e-4, 1e4, 0.0, 1.0], device=x.device)[:, None]
    producer = Producer(4, 48, torch.float32)
    found = producer.run(x, weight, workspace)
    _, behind, _ = product(4, 33, 48, "plain", torch.float32)
    out = poisoned(4, 33)
    small_linear(out, found, behind, workspace)
    norm = {"norm_weight": producer.weight, "eps": EPS}
    expected = small_linear_ref(producer.out[:4], behind, **norm, dtype=torch.float64)
    for row in (0, 1, 3):
        assert relative_error(out[row], expected[row]) < TOLERANCE[torch.float32]
    assert not out[2].any()


@pytest.mark.parametrize("m", [2, 33])
def test_a_chain_of_products_that_share_norms_repeats_to_the_last_bit(m) -> None:
    """Blocks of two products; on a GPU in a graph of dependent launches, where a missing wait would
    read what is half written."""
    dtype, blocks = DTYPES[-1], 4
    hidden, inner = (1024, 3072) if IS_NATIVE else (96, 160)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    weights = [
        (
            (randn(2 * inner, hidden, seed=2 * i) * hidden**-0.5).to(dtype),
            (randn(hidden, inner, seed=2 * i + 1) * inner**-0.5).to(dtype),
        )
        for i in range(blocks)
    ]
    start, norm = randn(m, hidden, dtype=dtype, seed=7), randn(hidden, dtype=dtype, seed=9)
    stream, gated = start.clone(), poisoned(m, inner, dtype=dtype)
    squares = new_squares(m, hidden, stream.device).fill_(float("nan"))
    shared = NextNorm(norm, poisoned(m, hidden, dtype=dtype), squares, EPS)
    first = {"norm_weight": norm, "eps": EPS, "norm_scratch": shared.scaled}

    def chain() -> None:
        stream.copy_(start)
        left = None
        for up, down in weights:
            if left is None:
                small_linear(gated, stream, up, workspace, **first, glu=True)
            else:
                small_linear(gated, left, up, workspace, glu=True)
            left = small_linear(stream, gated, down, workspace, residual=stream, next_norm=shared)

    chain()
    again, repeats = chain, 1
    if IS_NATIVE:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        again, repeats = graph.replay, 50
    expected = start.double()
    for up, down in weights:
        options = {"norm_weight": norm, "eps": EPS, "glu": True}
        inside = small_linear_ref(expected, up, **options, dtype=torch.float64)
        expected = small_linear_ref(inside, down, residual=expected, dtype=torch.float64)
    again()
    once = stream.clone()
    assert relative_error(once, expected) < 1.5e-2
    for _ in range(repeats):
        again()
        assert torch.equal(stream, once)
