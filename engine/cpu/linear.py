"""Linear layers of the CPU runner: dense float32, and quantized weights that stay small.

Which one a quantized matrix gets is the scheme's choice: 8-bit products (`int8.py`), or the packed
operators of this file. Those take bfloat16 activations and accumulate in float32. 4-bit groups of
32 keep the checkpoint's integers; their scales are rounded to bfloat16. 8-bit and 6-bit weights are
requantized to one scale a row, because the 8-bit operator knows no groups.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch
from torch.nn.functional import linear

from engine.cpu.int8 import DynamicInt8Linear, NormedInt8Linear, TokenRotator, block_of
from engine.cpu.norm import Residual, RmsNorm
from engine.model.quantized import AffineGroups, QuantizedMatrix
from engine.model.weights import Matrix

_GROUP = 32
_Q4_CENTER = 8
_ROW_MULTIPLE = 64  # the packed 4-bit layout works on whole tiles of output rows
_CHUNK_ROWS = 4096


class Scheme(Enum):
    """How products with quantized weights are computed. The value is its name in the log."""

    NONE = "none"
    PACKED = "packed"
    INT8 = "int8"


class Linear(Protocol):
    """y = x W^T + bias."""

    input_dtype: torch.dtype
    is_exact: bool  # computes with the checkpoint's own numbers, in float32
    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] in `input_dtype` -> [T, N] in `input_dtype`."""
        ...


class FromResidual(Protocol):
    """y = norm(residual) W^T + bias."""

    num_bytes: int

    def __call__(self, residual: Residual) -> torch.Tensor:
        """-> [T, N] in the layer's own dtype."""
        ...


class IntoResidual(Protocol):
    """residual += x W^T."""

    num_bytes: int

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """x [T, K] contiguous."""
        ...


class NormedLinear:
    """A norm and any linear layer behind it."""

    def __init__(self, linear: Linear, norm: torch.Tensor) -> None:
        self._linear = linear
        self._norm = RmsNorm(norm, linear.input_dtype)
        self.num_bytes = linear.num_bytes

    def __call__(self, residual: Residual) -> torch.Tensor:
        """-> [T, N] in the dtype of the linear layer."""
        return self._linear(self._norm(residual))


class AddedLinear:
    """Any linear layer whose result is added to the residual stream."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.num_bytes = linear.num_bytes

    def add_to(self, residual: Residual, x: torch.Tensor) -> None:
        """x [T, K]."""
        residual.values.add_(self._linear(x.to(self._linear.input_dtype)))


class DenseLinear:
    """float32 weights, exact."""

    input_dtype = torch.float32
    is_exact = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, K] -> float32 [T, N]."""
        return linear(x, self._weight, self._bias)


class Int4Linear:
    """4-bit weights in groups of 32, bfloat16 activations."""

    input_dtype = torch.bfloat16
    is_exact = False

    def __init__(self, groups: AffineGroups, bias: torch.Tensor | None = None) -> None:
        """The operator computes (q - 8) * scale + zero, so zero = minimum + 8 * scale."""
        scale = groups.scale.to(torch.bfloat16)
        # Taking the rounded scale here makes the middle of the range, not its end, exact.
        zero = groups.minimum + _Q4_CENTER * groups.scale
        pair = torch.stack([scale, zero.to(torch.bfloat16)], dim=-1)
        self._scale_zero = pair.transpose(0, 1).contiguous()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.q.int(), 1)
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        self.num_bytes = self._packed.numel() + 2 * self._scale_zero.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, K] -> bfloat16 [T, N]."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, _GROUP, self._scale_zero
        )
        return y if self._bias is None else y.add_(self._bias)


class Int8Linear:
    """8-bit weights with one scale a row, bfloat16 activations."""

    input_dtype = torch.bfloat16
    is_exact = False

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> None:
        num_rows, num_columns = matrix.shape
        self._weight = torch.empty(num_rows, num_columns, dtype=torch.int8)
        self._scale = torch.empty(num_rows, dtype=torch.bfloat16)
        for start in range(0, num_rows, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            dense = matrix.take(part).dequantize()
            largest = dense.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny)
            # The rounded scale is what the operator multiplies with; a little above the exact one,
            # so that no integer overflows.
            scale = (largest / 126.5).to(torch.bfloat16)
            self._scale[part] = scale
            self._weight[part] = (dense / scale.float()[:, None]).round_().to(torch.int8)
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        self.num_bytes = self._weight.numel() + 2 * num_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, K] -> bfloat16 [T, N]."""
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scale)
        return y if self._bias is None else y.add_(self._bias)


class LinearFactory:
    """Makes the linear layers of one model."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._rotators: dict[int, TokenRotator] = {}  # by number of columns

    def __call__(self, matrix: Matrix) -> Linear:
        """The scheme's layer for a quantized matrix of this shape, dense if it has none."""
        rotator = self._rotator(matrix)
        if rotator is not None and isinstance(matrix, QuantizedMatrix):
            return DynamicInt8Linear(matrix, rotator)
        return _plain(matrix)

    def normed(
        self, matrix: Matrix, norm: torch.Tensor, bias: torch.Tensor | None = None
    ) -> FromResidual:
        """The same behind a norm of this weight, [K]."""
        rotator = self._rotator(matrix)
        if rotator is not None and isinstance(matrix, QuantizedMatrix):
            return NormedInt8Linear(matrix, rotator, norm, bias)
        return NormedLinear(_plain(matrix, bias), norm)

    def added(self, matrix: Matrix) -> IntoResidual:
        """The same for a result that the residual stream takes up."""
        linear = self(matrix)
        return linear if isinstance(linear, DynamicInt8Linear) else AddedLinear(linear)

    def _rotator(self, matrix: Matrix) -> TokenRotator | None:
        """What 8-bit products of this matrix need; None if there are none."""
        num_columns = matrix.shape[1]
        if self._scheme is not Scheme.INT8 or not block_of(num_columns):
            return None
        return self._rotators.setdefault(num_columns, TokenRotator(num_columns))


def _plain(matrix: Matrix, bias: torch.Tensor | None = None) -> Linear:
    if isinstance(matrix, torch.Tensor):
        return DenseLinear(matrix, bias)
    num_rows, num_columns = matrix.shape
    if num_columns % _GROUP or num_rows % _ROW_MULTIPLE:
        return DenseLinear(matrix.dequantize(), bias)
    if matrix.kind.is_4bit_group32:
        return Int4Linear(matrix.affine(), bias)
    return Int8Linear(matrix, bias)
