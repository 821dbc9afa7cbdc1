"""How checkpoint bytes get into parameters: plainly on the CPU, through pinned memory to a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from engine.loader.staging import StagedUpload, Staging, Transfer


def upload(
    transfers: Sequence[Transfer],
    device: torch.device | str,
    sent: Callable[[int], None],
    staging: Staging | None = None,
) -> None:
    """Fill every target from its file; numbers are converted to the target's type.

    Args:
        device: of all targets. On "meta" everything is read and nothing is kept: a measurement.
        sent: called in this thread with the number of bytes that are on their way or there.
        staging: of any device but the CPU, which stages nothing; None: what suits the processors
            of this process.

    Raises:
        CheckpointError: a file cannot be read or ends early.
        ValueError: a target is not contiguous.
    """
    device = torch.device(device)
    if device.type != "cpu":
        StagedUpload(device, staging or Staging.for_processors()).run(transfers, sent)
        return
    for transfer in transfers:
        transfer.target.copy_(transfer.source)
        sent(transfer.num_bytes)


def prefetch(paths: Iterable[Path]) -> None:
    """Ask the kernel to read files ahead; a hint, without effect where they are cached."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
