"""8-bit products on the CPU: each token by itself, exact in integers, near the true product."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.cpu.int8 import (
    NUM_PADS,
    DynamicInt8Linear,
    TokenQuantizer,
    block_of,
    has_int8_products,
    rotate,
)
from engine.model.quantized import QuantizedMatrix, QuantKind

ROWS, COLUMNS = 320, 192


@pytest.fixture(scope="module")
def matrix() -> QuantizedMatrix:
    return make_matrix(ROWS, COLUMNS)


def make_matrix(num_rows: int, num_columns: int) -> QuantizedMatrix:
    dense = np.random.default_rng(3).normal(0, 0.1, (num_rows, num_columns)).astype(np.float32)
    rows = gguf.quants.quantize(dense, gguf.GGMLQuantizationType.Q4_1)
    return QuantizedMatrix(rows, QuantKind.Q4_1, (num_rows, num_columns))


def make_layer(matrix: QuantizedMatrix) -> DynamicInt8Linear:
    if not has_int8_products():
        pytest.skip("this CPU has no fast 8-bit products")
    return DynamicInt8Linear(matrix, TokenQuantizer(matrix.shape[1]))


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    """Activations with a few large ones, as models have them."""
    x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed))
    x[:, 5] *= 40
    return x


@pytest.mark.parametrize(("size", "block"), [(576, 64), (1536, 64), (96, 32), (48, 16), (40, 0)])
def test_blocks_are_the_largest_power_of_two_up_to_64(size: int, block: int) -> None:
    assert block_of(size) == block


def test_a_rotation_is_undone_by_itself_and_keeps_products() -> None:
    x, y = tokens(4), tokens(4, seed=2)
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(1), (x * y).sum(1))


def test_tokens_are_rounded_to_whole_numbers_of_their_own_range() -> None:
    x = tokens(5) * torch.tensor([[1e-6], [1.0], [1e6], [3.0], [0.1]])
    whole, largest = TokenQuantizer(COLUMNS)(x)
    assert whole.shape == (5, COLUMNS + NUM_PADS)
    numbers = whole[:, :COLUMNS]
    torch.testing.assert_close(numbers, numbers.round(), rtol=0, atol=0)
    assert numbers.abs().amax(dim=1).tolist() == [127] * 5
    error = (numbers * largest / 127 - x).abs()
    assert bool((error <= largest * (0.5 / 127 + 1e-6)).all())


def test_a_product_is_near_the_true_one(matrix: QuantizedMatrix) -> None:
    x = tokens(7)
    expected = x @ matrix.dequantize().T
    error = make_layer(matrix)(x) - expected
    assert float(error.norm() / expected.norm()) < 0.02


def test_without_the_rotation_large_activations_would_cost_more(matrix: QuantizedMatrix) -> None:
    x = tokens(7)
    numbers, largest = TokenQuantizer(COLUMNS)(x)
    plain = numbers[:, :COLUMNS] * largest / 127 - x
    numbers, largest = TokenQuantizer(COLUMNS)(rotate(x))
    rotated = numbers[:, :COLUMNS] * largest / 127 - rotate(x)
    assert float(rotated.norm()) < 0.5 * float(plain.norm())


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 64, 200])
def test_a_token_has_the_same_bits_in_any_company(matrix: QuantizedMatrix, count: int) -> None:
    layer = make_layer(matrix)
    x = tokens(count) * torch.logspace(-3, 3, count)[:, None]
    together = layer(x)
    for i in range(count):
        assert torch.equal(layer(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_spoils_itself_only(
    matrix: QuantizedMatrix, value: float
) -> None:
    layer = make_layer(matrix)
    x = tokens(4)
    clean = layer(x)
    x[2, 9] = value
    y = layer(x)
    assert not bool(torch.isfinite(y[2]).any())
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_token_of_zeros_gives_zeros(matrix: QuantizedMatrix) -> None:
    x = tokens(3)
    x[1] = 0
    assert bool((make_layer(matrix)(x)[1] == 0).all())


def test_a_bias_is_added(matrix: QuantizedMatrix) -> None:
    layer = make_layer(matrix)
    bias = torch.arange(ROWS, dtype=torch.float32)
    biased = DynamicInt8Linear(matrix, TokenQuantizer(COLUMNS), bias)
    x = tokens(2)
    assert torch.equal(biased(x), layer(x) + bias)
