"""Buffers that all steps of a runner share, one step after the other on one stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.gpu.activations import Activations, HeadBuffers, new_activations, new_head_buffers
from engine.gpu.attention_plans import AttentionPlans, new_attention_plans
from engine.gpu.memory import StepLimits
from engine.model.spec import ModelSpec
from kernels.sampler import SamplerWorkspace, new_sampler_workspace


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """out_tokens int32, out_bad int8 [max rows]: what the last step sampled."""

    activations: Activations
    head: HeadBuffers
    sampler: SamplerWorkspace
    attention: AttentionPlans
    out_tokens: torch.Tensor
    out_bad: torch.Tensor


def new_shared_buffers(
    spec: ModelSpec,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
    same_bits: bool = False,
) -> SharedBuffers:
    """Allocate for the largest step; same_bits: a row's result is the same in every batch."""
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    return SharedBuffers(
        activations=new_activations(spec, tokens, dtype, device, same_bits),
        head=new_head_buffers(spec, limits, dtype, device),
        sampler=new_sampler_workspace(limits.max_num_seqs, spec.vocab_size, device),
        attention=new_attention_plans(spec, limits, dtype, device, same_bits),
        out_tokens=torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device),
        out_bad=torch.zeros(limits.max_num_seqs, dtype=torch.int8, device=device),
    )
