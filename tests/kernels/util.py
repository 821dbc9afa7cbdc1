"""Shared by the kernel tests: device, data types, error measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_NATIVE = DEVICE == "cuda"
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16] if IS_NATIVE else [torch.float32, torch.float16]
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest relative error, by data type, of one kernel against float64 on the same inputs."""


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; with a NaN anywhere it is NaN."""
    difference = out.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm().clamp_min(1e-30))


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN: an element that a kernel forgets to write stays visible."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device, rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _let_numpy_2_4_index_by_scalars() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element, which NumPy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def dot_row_by_row(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """The interpreter's `create_dot` without BLAS: a row of a product has the same bits wherever it
    stands, as on the GPU. What BLAS does at a tile's edge depends on the processor."""
    numbers = [tensor.data.astype(d.data.dtype, copy=False) for tensor in (a, b)]
    product = np.einsum("...mk,...kn->...mn", *numbers)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_let_numpy_2_4_index_by_scalars()
