"""8-bit products on the CPU: each token by itself, exact in integers, near the true product."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.cpu.int8 import (
    DynamicInt8Linear,
    NormedInt8Linear,
    TokenRotator,
    block_of,
    has_int8_products,
    rotate,
)
from engine.cpu.norm import Residual
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
    return DynamicInt8Linear(matrix, TokenRotator(matrix.shape[1]))


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


@pytest.mark.parametrize("count", [1, 5, 300])
def test_tokens_are_rotated_each_by_itself(count: int) -> None:
    x = tokens(count)
    rotator = TokenRotator(COLUMNS)
    together = rotator(x.numpy()).clone()
    torch.testing.assert_close(together, rotate(x))
    for i in range(0, count, 37):
        assert torch.equal(rotator(x[i : i + 1].numpy())[0], together[i])


def test_a_weight_is_applied_before_the_rotation() -> None:
    x, weight = tokens(3), tokens(1, seed=2)[0]
    rotator = TokenRotator(COLUMNS)
    torch.testing.assert_close(rotator.weighted(x.numpy(), weight.numpy()), rotate(x * weight))


def test_a_product_is_near_the_true_one(matrix: QuantizedMatrix) -> None:
    x = tokens(7)
    expected = x @ matrix.dequantize().T
    error = make_layer(matrix)(x) - expected
    assert float(error.norm() / expected.norm()) < 0.02


def test_without_the_rotation_large_activations_would_cost_more() -> None:
    def error(x: torch.Tensor) -> float:
        step = x.abs().amax(dim=1, keepdim=True) / 127
        return float(((x / step).round() * step - x).norm())

    x = tokens(7)
    assert error(rotate(x)) < 0.5 * error(x)


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


def test_a_product_is_added_to_the_residual_stream(matrix: QuantizedMatrix) -> None:
    layer = make_layer(matrix)
    x, before = tokens(4), torch.randn(4, ROWS)
    residual = Residual.of(before, eps=1e-5)
    layer.add_to(residual, x)
    torch.testing.assert_close(residual.values, before + layer(x))


@pytest.mark.parametrize("count", [1, 6])
def test_a_norm_before_a_product_is_part_of_it(matrix: QuantizedMatrix, count: int) -> None:
    layer = make_layer(matrix)
    weight, bias = tokens(1, seed=4)[0], torch.randn(ROWS)
    normed = NormedInt8Linear(matrix, TokenRotator(COLUMNS), weight, bias)
    x = tokens(count) * torch.logspace(-3, 3, count)[:, None]
    expected = layer(torch.nn.functional.rms_norm(x, (COLUMNS,), weight, eps=1e-5)) + bias
    # Where a number lies between two levels, the last bit decides which one it gets.
    torch.testing.assert_close(normed(Residual.of(x, eps=1e-5)), expected, rtol=0.01, atol=0.05)
