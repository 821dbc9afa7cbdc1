"""Linear layers with 8-bit weights and 8-bit activations, summed in integers.

Weights have one scale a row, activations one scale a token. Sums of integers are exact, so the
result of a token has the same bits whatever else is in the step. What 8 bits would lose is kept by
rotating both sides first (QuaRot, Ashkboos et al. 2024): W x = (W R)(R x). R, blocks of a normed
Hadamard matrix, symmetric and its own inverse, spreads the few large activations over their block.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch

from engine.model.quantized import QuantizedMatrix

_LARGEST_BLOCK = 64
_SMALLEST_BLOCK = 16
_LEVELS = 127
NUM_PADS = 64  # two are needed; as many keep lines aligned
_CHUNK_ROWS = 4096


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


class TokenQuantizer:
    """Rounds tokens to 8 bits for `quantized::linear_dynamic`, whatever tokens come together.

    That operator chooses one scale for all tokens it is given. Two more columns, which meet weights
    of zero, hold the ends of the range, so the scale it finds is 1 and integers stay what they are.
    """

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._levels = torch.full((1, 1), float(_LEVELS))
        self._buffer = torch.empty(0, num_columns + NUM_PADS)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of tokens

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [T, K] -> (whole numbers as float32 [T, K + NUM_PADS], largest float32 [T, 1]).

        x is about whole * largest / 127. The first result is overwritten by the next call. Of a
        token that is not finite, largest is not either; its whole numbers are finite, for a NaN
        among them would spoil the scale of all tokens.
        """
        padded, whole = self._views.get(x.shape[0]) or self._make_views(x.shape[0])
        largest = x.abs().amax(dim=1, keepdim=True)
        torch.mul(x, torch.div(self._levels, largest), out=whole).round_()
        torch.nan_to_num_(whole, nan=0.0, posinf=0.0, neginf=0.0)
        return padded, largest

    def _make_views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if num_tokens > len(self._buffer):
            self._buffer = torch.zeros(num_tokens, self._num_columns + NUM_PADS)
            self._buffer[:, self._num_columns] = -_LEVELS - 1
            self._buffer[:, self._num_columns + 1] = _LEVELS
            self._views.clear()
        padded = self._buffer[:num_tokens]
        views = self._views[num_tokens] = (padded, padded[:, : self._num_columns])
        return views


class DynamicInt8Linear:
    """y = x W^T + bias; x is rotated and quantized here."""

    input_dtype = torch.float32
    is_exact = False

    def __init__(
        self, matrix: QuantizedMatrix, quantizer: TokenQuantizer, bias: torch.Tensor | None = None
    ) -> None:
        """quantizer: for matrix.shape[1] columns, a number that `block_of` accepts."""
        num_rows, num_columns = matrix.shape
        weight = torch.zeros(num_rows, num_columns + NUM_PADS, dtype=torch.int8)
        scale = torch.empty(num_rows)
        for start in range(0, num_rows, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            dense = rotate(matrix.take(part).dequantize())
            largest = dense.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny)
            scale[part] = largest / _LEVELS
            weight[part, :num_columns] = (dense / scale[part, None]).round_().to(torch.int8)
        self._packed = _pack(weight, scale / _LEVELS)
        self._quantizer = quantizer
        self._block = block_of(num_columns)
        self._turn = hadamard(self._block)
        self._bias = None if bias is None else bias.float()
        self.num_bytes = weight.numel() + scale.numel() * scale.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, K] -> float32 [T, N]."""
        rotated = torch.mm(x.view(-1, self._block), self._turn).view(x.shape)
        whole, largest = self._quantizer(rotated)
        y = _product(whole, self._packed).mul_(largest)
        return y if self._bias is None else y.add_(self._bias)


def _pack(weight: torch.Tensor, scale: torch.Tensor) -> torch.ScriptObject:
    """int8 [N, K + NUM_PADS] and float32 [N] in the operator's own layout."""
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        # Torch means to drop quantized tensors some day; `has_int8_products` then says no.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation.*")
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def _product(whole: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """float32 [T, K + NUM_PADS] of whole numbers -> float32 [T, N], summed in integers."""
    y: torch.Tensor = torch.ops.quantized.linear_dynamic(whole, packed, False)
    return y


@cache
def has_int8_products() -> bool:
    """Whether this CPU multiplies bytes fast (VNNI) and this torch sums them exactly."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    if "avx512_vnni" not in flags and "avx_vnni" not in flags:
        return False
    # Without 32-bit sums, pairs of the largest products overflow.
    weight = torch.zeros(64, 128 + NUM_PADS, dtype=torch.int8)
    weight[0::2, :128], weight[1::2, :128] = _LEVELS, -_LEVELS
    whole, _ = TokenQuantizer(128)(torch.ones(3, 128))
    expected = whole @ weight.float().T
    try:
        return torch.equal(_product(whole, _pack(weight, torch.ones(64))), expected)
    except (AttributeError, RuntimeError):  # a build of torch without these operators
        return False
