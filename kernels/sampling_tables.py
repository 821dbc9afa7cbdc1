"""Sampling parameters on the device, one entry per stable row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_STOP_IDS = 8
"""Stop ids per row that min_tokens can hold back."""


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters on the device, indexed by stable row.

    temperature float32 [rows], below 1e-5: greedy. top_k int32 [rows], 0: off. top_p float32
    [rows], 1: off. min_p float32 [rows], 0: off. seed int64 [rows]. min_position int32 [rows]:
    stop ids are not sampled at positions below it. stop_ids int32 [rows, MAX_STOP_IDS], padded
    with -1.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    min_position: torch.Tensor
    stop_ids: torch.Tensor


def new_sampling_tables(num_rows: int, device: torch.device) -> SamplingTables:
    """Allocate tables in which every row is greedy and unfiltered."""

    def filled(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

    return SamplingTables(
        temperature=filled(0.0, torch.float32),
        top_k=filled(0, torch.int32),
        top_p=filled(1.0, torch.float32),
        min_p=filled(0.0, torch.float32),
        seed=filled(0, torch.int64),
        min_position=filled(0, torch.int32),
        stop_ids=filled(-1, torch.int32, MAX_STOP_IDS),
    )
