"""Matrices that stay in a GGUF file's block format: rows of blocks with their own scales.

A row can be taken, moved and concatenated without touching the numbers; `dequantize` gives float32,
`affine` the integers, scales and minima of the 4-bit formats, which packed CPU products use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import gguf
import numpy as np
import numpy.typing as npt
import torch

_GROUP = 32
_K_BLOCK = 256
_Q4_OFFSET = 8


class QuantKind(Enum):
    """Block formats that are understood. The value is the name GGUF gives them."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q6_K = "Q6_K"
    Q8_0 = "Q8_0"

    @property
    def is_4bit_group32(self) -> bool:
        """Every 32 weights of a row share one scale and one minimum, weights have 4 bits."""
        return self in (QuantKind.Q4_0, QuantKind.Q4_1, QuantKind.Q4_K)


@dataclass(frozen=True, slots=True)
class AffineGroups:
    """w = q * scale + minimum. q uint8 [N, K] in 0 .. 15; scale and minimum float32 [N, K / 32]."""

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """rows uint8 [N, bytes of a row], one `kind` for all of them; shape is (N, K) in weights."""

    rows: npt.NDArray[np.uint8]
    kind: QuantKind
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return int(self.rows.nbytes)

    def take(self, rows: slice | npt.NDArray[np.int64]) -> QuantizedMatrix:
        """Some of the rows, in the order given."""
        part = self.rows[rows]
        return QuantizedMatrix(part, self.kind, (len(part), self.shape[1]))

    def permuted(self, order: npt.NDArray[np.int64]) -> QuantizedMatrix:
        """The same matrix with its rows in another order."""
        return QuantizedMatrix(self.rows[order], self.kind, self.shape)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        if self.kind is QuantKind.Q8_0:
            return self._dequantize_q8_0()
        ggml_type = gguf.GGMLQuantizationType[self.kind.value]
        values = gguf.quants.dequantize(self.rows, ggml_type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    def _dequantize_q8_0(self) -> torch.Tensor:
        """A short way for the format of most embeddings, which are looked up row by row."""
        num_rows, num_columns = self.shape
        blocks = self.rows.reshape(num_rows, num_columns // _GROUP, 2 + _GROUP)
        values = blocks[:, :, 2:].view(np.int8) * _half(blocks[:, :, :2])[:, :, None]
        return torch.from_numpy(values.reshape(num_rows, num_columns))

    def affine(self) -> AffineGroups:
        """Integers, scales and minima of a 4-bit matrix. Raises ValueError for other kinds."""
        if self.kind is QuantKind.Q4_K:
            return self._affine_q4_k()
        if not self.kind.is_4bit_group32:
            raise ValueError(f"{self.kind.value} has no 4-bit groups of {_GROUP}")
        num_rows, num_columns = self.shape
        head = 4 if self.kind is QuantKind.Q4_1 else 2
        blocks = self.rows.reshape(num_rows, num_columns // _GROUP, head + _GROUP // 2)
        scale = _half(blocks[:, :, 0:2])
        minimum = _half(blocks[:, :, 2:4]) if head == 4 else -_Q4_OFFSET * scale
        nibbles = blocks[:, :, head:]
        q = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=2).reshape(num_rows, num_columns)
        return _affine(q, scale, minimum)

    def _affine_q4_k(self) -> AffineGroups:
        num_rows, num_columns = self.shape
        blocks = self.rows.reshape(num_rows * (num_columns // _K_BLOCK), -1)
        scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
        scale = _half(blocks[:, 0:2])[:, None] * scales.astype(np.float32)
        minimum = -_half(blocks[:, 2:4])[:, None] * minima.astype(np.float32)
        quarter = blocks[:, 16:].reshape(len(blocks), 4, 1, _GROUP)
        nibbles = np.concatenate([quarter & 0x0F, quarter >> 4], axis=2)
        groups = num_columns // _GROUP
        return _affine(
            nibbles.reshape(num_rows, num_columns),
            scale.reshape(num_rows, groups),
            minimum.reshape(num_rows, groups),
        )


def concat_rows(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of one kind and width, one below the other."""
    rows = np.concatenate([part.rows for part in parts], axis=0)
    return QuantizedMatrix(rows, parts[0].kind, (len(rows), parts[0].shape[1]))


def _half(two_bytes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 [..., 2] -> float32 [...], each pair read as little-endian float16."""
    return np.ascontiguousarray(two_bytes).view("<f2")[..., 0].astype(np.float32)


def _affine(
    q: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], minimum: npt.NDArray[np.float32]
) -> AffineGroups:
    return AffineGroups(
        torch.from_numpy(np.ascontiguousarray(q)),
        torch.from_numpy(np.ascontiguousarray(scale)),
        torch.from_numpy(np.ascontiguousarray(minimum)),
    )
