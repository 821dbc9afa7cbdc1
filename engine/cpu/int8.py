"""Linear layers with 8-bit weights and 8-bit activations, summed in integers.

Weights have one scale a row, activations one scale a token. Sums of integers are exact, so the
result of a token has the same bits whatever else is in the step. What 8 bits would lose is kept by
rotating both sides first (QuaRot, Ashkboos et al. 2024): W x = (W R)(R x). R, blocks of a normed
Hadamard matrix, symmetric and its own inverse, spreads the few large activations over their block.

A token's scale does not matter to its whole numbers, so it is applied to the result, together with
what a norm before the layer divides by: a step of one token is bound by the number of operators.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.cpu.compiled import compiled
from engine.cpu.norm import Residual
from engine.cpu.tables import FloatArray
from engine.model.quantized import QuantizedMatrix

_LARGEST_BLOCK = 64
_SMALLEST_BLOCK = 16
_LEVELS = 127
_CHUNK_ROWS = 4096
_MOST_ROWS = 64  # of one rotating product


if TYPE_CHECKING:
    _Packed = torch.ScriptObject
else:
    try:
        _Packed = torch.classes.quantized.LinearPackedParamsBase
    except RuntimeError:  # a build of torch without it: `has_int8_products` says no
        _Packed = torch.Tensor


def block_of(size: int) -> int:
    """Edge of the Hadamard blocks that a dimension is rotated with; 0 if it cannot be."""
    block = min(size & -size, _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else 0


@cache
def hadamard(block: int) -> torch.Tensor:
    """float32 [block, block], orthogonal and symmetric. block: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    normed: torch.Tensor = matrix / block**0.5
    return normed


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x R along the last dimension, float32 [..., K] contiguous -> the same shape."""
    block = block_of(x.shape[-1])
    rotated: torch.Tensor = x.view(-1, block) @ hadamard(block)
    return rotated.view(x.shape)


class TokenRotator:
    """Rotates tokens, one small product for each, so that none depends on the others.

    With NumPy, whose products of this size take a third of the time of torch's.
    """

    def __init__(self, num_columns: int) -> None:
        """num_columns: a number that `block_of` accepts."""
        self._num_columns = num_columns
        block = block_of(num_columns)
        num_blocks = num_columns // block
        # Larger products would wake threads of NumPy's own.
        rows = next(n for n in range(_MOST_ROWS, 0, -1) if num_blocks % n == 0)
        self._shape = (num_blocks // rows, rows, block)
        self._turn = hadamard(block).numpy()
        self._buffers = torch.empty(2, 0, num_columns)
        self._views: dict[int, _Views] = {}  # by number of tokens

    def __call__(self, x: FloatArray) -> torch.Tensor:
        """x R, float32 [T, K] contiguous -> [T, K], overwritten by the next call."""
        views = self._views.get(len(x)) or self._make_views(len(x))
        np.matmul(x.reshape(views.by_block.shape), self._turn, out=views.by_block)
        return views.rotated

    def weighted(self, x: FloatArray, weight: FloatArray) -> torch.Tensor:
        """(x * weight) R, float32 [T, K] and [K] -> as above."""
        views = self._views.get(len(x)) or self._make_views(len(x))
        np.multiply(x, weight, out=views.product)
        np.matmul(views.product_by_block, self._turn, out=views.by_block)
        return views.rotated

    def _make_views(self, num_tokens: int) -> _Views:
        if num_tokens > self._buffers.shape[1]:
            self._buffers = torch.empty(2, num_tokens, self._num_columns)
            self._views.clear()
        rotated, product = self._buffers[:, :num_tokens]
        shape = (num_tokens, *self._shape)
        by_block, product_by_block = (x.numpy().reshape(shape) for x in (rotated, product))
        views = _Views(rotated, by_block, product.numpy(), product_by_block)
        self._views[num_tokens] = views
        return views


@dataclass(frozen=True, slots=True)
class _Views:
    """Memory of a rotation: its result twice, then what it is made of twice."""

    rotated: torch.Tensor  # [T, K]
    by_block: FloatArray  # [T, .., block]
    product: FloatArray
    product_by_block: FloatArray


@compiled
def _product(x: torch.Tensor, packed: _Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [T, K], changed -> (y [T, N], largest [T, 1]); y * largest is the product.

    The operator rounds to 1/127. Of a token that is not finite, largest is not either.
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x.div_(largest), 1 / 127, 128, packed
    )
    return y, largest


@compiled
def _scaled_product(x: torch.Tensor, packed: _Packed) -> torch.Tensor:
    y, largest = _product(x, packed)
    return y.mul_(largest)


@compiled
def _normed_product(x: torch.Tensor, lines: torch.Tensor, packed: _Packed) -> torch.Tensor:
    """Divided by the length of each line, float32 [T, H + 16]."""
    y, largest = _product(x, packed)
    return y.mul_(largest.div_(torch.linalg.vector_norm(lines, dim=1, keepdim=True)))


@compiled
def _add_product(residual: torch.Tensor, x: torch.Tensor, packed: _Packed) -> None:
    y, largest = _product(x, packed)
    residual.addcmul_(y, largest)


class DynamicInt8Linear:
    """y = x W^T."""

    input_dtype = torch.float32
    is_exact = False

    def __init__(self, matrix: QuantizedMatrix, rotator: TokenRotator) -> None:
        """rotator: for matrix.shape[1] columns."""
        self._packed, self.num_bytes = _pack_rotated(matrix, 1.0)
        self._rotate = rotator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, K] contiguous -> float32 [T, N]."""
        return _scaled_product(self._rotate(x.numpy()), self._packed)

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """residual += y; x as above."""
        _add_product(residual.values, self._rotate(x.numpy()), self._packed)


class NormedInt8Linear:
    """y = norm(residual) W^T + bias."""

    def __init__(
        self,
        matrix: QuantizedMatrix,
        rotator: TokenRotator,
        norm: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """norm: its weight, [K]."""
        self._packed, self.num_bytes = _pack_rotated(matrix, math.sqrt(len(norm)))
        self._rotator = rotator
        self._norm = norm.float().numpy()
        self._bias = None if bias is None else bias.float()

    def __call__(self, residual: Residual) -> torch.Tensor:
        """-> float32 [T, N]."""
        rotated = self._rotator.weighted(residual.array, self._norm)
        y = _normed_product(rotated, residual.lines, self._packed)
        return y if self._bias is None else y.add_(self._bias)


def _pack_rotated(matrix: QuantizedMatrix, factor: float) -> tuple[torch.ScriptObject, int]:
    """Rotated and rounded to 8 bits; factor: what scales are multiplied by. And the bytes of it."""
    num_rows, num_columns = matrix.shape
    weight = torch.empty(num_rows, num_columns, dtype=torch.int8)
    scale = torch.empty(num_rows)
    for start in range(0, num_rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        dense = rotate(matrix.take(part).dequantize())
        largest = dense.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny)
        scale[part] = largest / _LEVELS
        weight[part] = (dense / scale[part, None]).round_().to(torch.int8)
    num_bytes = weight.numel() + scale.numel() * scale.element_size()
    return _pack(weight, scale * factor), num_bytes


def _pack(weight: torch.Tensor, scale: torch.Tensor) -> torch.ScriptObject:
    """int8 [N, K] and float32 [N] in the operator's own layout."""
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        # Torch means to drop quantized tensors some day; `has_int8_products` then says no.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation.*")
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


@cache
def has_int8_products() -> bool:
    """Whether this CPU multiplies bytes fast (VNNI) and this torch sums them exactly."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    if "avx512_vnni" not in flags and "avx_vnni" not in flags:
        return False
    # Without 32-bit sums, pairs of the largest products overflow.
    weight = torch.zeros(64, 128, dtype=torch.int8)
    weight[0::2], weight[1::2] = _LEVELS, -_LEVELS
    x = torch.ones(3, 128)
    x[1], x[2, ::3] = -1.0, 0.0
    expected = x @ weight.float().T * _LEVELS
    try:
        y, _ = _product(x, _pack(weight, torch.ones(64)))
    except (AttributeError, RuntimeError):  # a build of torch without these operators
        return False
    return torch.equal((y * _LEVELS).round_(), expected)
