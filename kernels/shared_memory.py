"""Tiles on GPUs with less shared memory than those that the tables were made on.

The number of stages of a pipelined loop changes no bit of a result: where a tile's buffers do not
fit, it has fewer.
"""

from __future__ import annotations

from functools import cache

import triton
from triton.runtime import driver

TABLE_BYTES = 232_448
"""Shared memory of one program on an H200."""
_MARGIN_BYTES = 4096
"""For exchanges between warps, and barriers."""


def fitting_stages(stages: int, stage_bytes: int) -> int:
    """Most stages up to `stages` whose buffers, of stage_bytes for each but the first, fit on the
    current device; at least 1."""
    limit = _limit_bytes()
    if limit >= TABLE_BYTES:
        return stages
    return max(1, min(stages, (limit - _MARGIN_BYTES) // stage_bytes + 1))


def fits(num_bytes: int) -> bool:
    """Whether a program's buffers of so many bytes fit on the current device."""
    return num_bytes <= _limit_bytes() - _MARGIN_BYTES


def _limit_bytes() -> int:
    if triton.knobs.runtime.interpret:
        return TABLE_BYTES
    return _shared_bytes(driver.active.get_current_device())


@cache
def _shared_bytes(device_index: int) -> int:
    """Shared memory that one program may have."""
    return int(driver.active.utils.get_device_properties(device_index)["max_shared_mem"])
