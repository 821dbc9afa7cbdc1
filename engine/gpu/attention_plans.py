"""Work lists and workspaces of decode attention, one pair per distinct window size and tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.gpu.memory import StepLimits
from engine.model.spec import ModelSpec
from kernels.decode_partials import DecodeWorkspace, new_decode_workspace
from kernels.decode_plan import DecodePlan, new_decode_plan
from kernels.tiles import decode_tiles

MAX_SLOTS = 2048
"""Partial results held at once: 256 rows of 4,096 tokens in groups of 512."""


Plans = Mapping[int, tuple[DecodePlan, DecodeWorkspace]]
"""Window in tokens (0: full attention) -> (work list, workspace)."""


@dataclass(frozen=True, slots=True)
class AttentionPlans:
    """by_rows: (most rows, plans), numbers of rows rising, as in `kernels.tiles.decode_tiles`."""

    by_rows: tuple[tuple[int, Plans], ...]

    def of(self, num_rows: int) -> Plans:
        """The plans for a step of so many rows."""
        return next(plans for most, plans in self.by_rows if num_rows <= most)


def new_attention_plans(
    spec: ModelSpec,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
    same_bits: bool = False,
) -> AttentionPlans:
    """Allocate for max_num_seqs rows and every window of the model; same_bits: in every batch."""
    num_sms = num_processors(device)
    workspace = None
    by_rows = []
    for most, tile in decode_tiles(spec.head_dim, dtype, same_bits, spec.hidden_size):
        plans: dict[int, tuple[DecodePlan, DecodeWorkspace]] = {}
        for window in sorted(set(spec.windows)):
            plan = new_decode_plan(
                min(most, limits.max_num_seqs), tile, num_sms * tile.programs_per_sm, MAX_SLOTS,
                device, in_order=same_bits,
            )  # fmt: skip
            if workspace is None:  # steps and layers take turns
                workspace = new_decode_workspace(
                    plan, spec.num_heads, spec.num_kv_heads, spec.head_dim
                )
            plans[window] = (plan, workspace)
        by_rows.append((most, plans))
    return AttentionPlans(tuple(by_rows))


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 under Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
