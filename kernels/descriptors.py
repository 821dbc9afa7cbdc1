"""Descriptors of matrices, by which one instruction loads a whole tile."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor: loads of tiles by one instruction, with zeros beyond the edges."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def takes_descriptors(*matrices: torch.Tensor) -> bool:
    """Whether the hardware's rules hold: 16-byte aligned rows, a two-byte type."""
    return all(
        m.element_size() == 2 and m.data_ptr() % 16 == 0 and m.stride(0) * 2 % 16 == 0
        for m in matrices
    )
