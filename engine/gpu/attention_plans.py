"""Work lists and workspaces of decode attention, one pair per distinct window size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.gpu.memory import StepLimits
from engine.model.spec import ModelSpec
from kernels.decode_partials import DecodeWorkspace, new_decode_workspace
from kernels.decode_plan import DecodePlan, new_decode_plan
from kernels.tiles import FEW_DECODE_ROWS, decode_tile

MAX_SLOTS = 2048
"""Partial results held at once: 256 rows of 4,096 tokens in groups of 512."""


@dataclass(frozen=True, slots=True)
class AttentionPlans:
    """plans: window in tokens (0: full attention) -> (work list, workspace)."""

    plans: dict[int, tuple[DecodePlan, DecodeWorkspace]]


def new_attention_plans(
    spec: ModelSpec, limits: StepLimits, dtype: torch.dtype, device: torch.device
) -> AttentionPlans:
    """Allocate for max_num_seqs rows and every window of the model."""
    group_heads = spec.num_heads // spec.num_kv_heads
    tile = decode_tile(spec.head_dim, group_heads, dtype)
    few = decode_tile(spec.head_dim, group_heads, dtype, FEW_DECODE_ROWS[0])
    num_sms = num_processors(device)
    plans = {}
    for window in sorted(set(spec.windows)):
        plan = new_decode_plan(
            limits.max_num_seqs,
            tile,
            num_sms * tile.programs_per_sm,
            MAX_SLOTS,
            device,
            num_sms * few.programs_per_sm,
        )
        workspace = new_decode_workspace(plan, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        plans[window] = (plan, workspace)
    return AttentionPlans(plans)


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 under Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
