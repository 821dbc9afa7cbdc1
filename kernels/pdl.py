"""Programmatic dependent launch: a kernel may start while the one before it still runs.

A kernel built with PDL announces its dependents first, loads what depends on nothing (weights),
then waits for its predecessor. Every kernel of a chain must wait, also one that reads nothing of
its predecessor: the next one's wait covers only this one. Hopper and newer; elsewhere, and in the
interpreter, the constexpr PDL is false.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def is_pdl_supported(device_index: int) -> bool:
    """True for GPUs of compute capability 9.0 and up."""
    return torch.cuda.get_device_capability(device_index)[0] >= 9


def pdl_options(tensor: torch.Tensor, wanted: bool) -> dict[str, Any]:
    """Launch keywords that switch programmatic dependent launch on for kernels that write
    `tensor`."""
    if wanted and tensor.is_cuda and is_pdl_supported(tensor.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """First statement of a kernel without anything to prefetch: let the next one start, then
    wait."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def pdl_begin_late(PDL: tl.constexpr):
    """As `pdl_begin`, but the next kernel starts only when all work before this one is done. What
    comes behind may then read the results of that work before its own wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers):
    """Ask for the cache lines at `pointers` (any block of pointers, one a line); no result, no
    wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
