"""How a processor's fast memory is divided, between shared memory and L1 cache, for the kernels of
one graph.

A kernel that names no share gets what the driver thinks best for it alone. But a processor changes
the division only while it is idle, and in a chain of kernels that start early it never is: a
matrix-vector product, whose loads in flight live in the L1 cache, then runs with the little that a
kernel with large tiles has left of it. One share for all of them avoids that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton

_PREFERRED_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_AS_THE_DRIVER_LIKES = -1


@contextmanager
def shared_memory_share(percent: int | None) -> Iterator[None]:
    """Kernels launched inside ask for this share of shared memory, those of a graph that is being
    captured keep it; None: as the driver likes. Without effect in the interpreter."""
    if percent is None or triton.knobs.runtime.interpret:
        yield
        return
    set_share = _share_setter()
    functions: set[int] = set()

    def before_launch(metadata: Any) -> None:
        function = metadata.data["function"]
        if function not in functions:
            functions.add(function)
            set_share(function, percent)

    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(before_launch)
    try:
        yield
    finally:
        hooks.remove(before_launch)
        for function in functions:
            set_share(function, _AS_THE_DRIVER_LIKES)


def _share_setter() -> Callable[[int, int], None]:
    driver = ctypes.CDLL("libcuda.so.1")

    def set_share(function: int, percent: int) -> None:
        # A hint: where the driver does not take it, the kernel runs all the same.
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARE, percent)

    return set_share
