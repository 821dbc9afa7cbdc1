"""What goes where in GPU memory, decided once, before anything large is allocated.

The plan is measured, not guessed: weights are on the device already, the rest is what the driver
says is free. It is logged in one record, and refused with numbers where it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.errors import MemoryPlanError
from engine.model.spec import ModelSpec
from kernels.penalties import penalty_table_bytes

_GIB = 1 << 30
_GRAPH_BYTES_PER_LAYER = 224 << 10
"""Upper bound of what one captured step keeps for each layer: kernel nodes and their parameters.
Idle moments took 161 KiB with a model of 28 layers and 183 with one of 36, on an H200."""
_RUNTIME_BYTES = 768 << 20
"""cuBLAS workspaces, Triton modules and the allocator's slack."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that activations and tables follow from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def blocks_per_seq(self) -> int:
        """Columns of the block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; num_blocks is what the KV bytes hold."""

    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    penalty_bytes: int
    graph_bytes: int
    kv_bytes: int
    num_blocks: int

    def in_gib(self) -> dict[str, float | int]:
        """The plan for the log."""
        return {
            "total_gib": round(self.total_bytes / _GIB, 2),
            "weights_gib": round(self.weight_bytes / _GIB, 2),
            "activations_gib": round(self.activation_bytes / _GIB, 2),
            "penalties_gib": round(self.penalty_bytes / _GIB, 2),
            "graphs_gib": round(self.graph_bytes / _GIB, 2),
            "kv_gib": round(self.kv_bytes / _GIB, 2),
            "num_blocks": self.num_blocks,
        }


def activation_bytes(
    spec: ModelSpec, limits: StepLimits, element_bytes: int, deterministic: bool
) -> int:
    """Bytes of the activations of the largest step, logits of every row included. In deterministic
    mode gates and ups are in no buffer (see `engine.gpu.activations`)."""
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    per_token = 2 * spec.hidden_size + spec.qkv_size + spec.q_size
    per_token += (1 if deterministic else 3) * spec.intermediate_size
    tables = seqs * (limits.max_model_len + limits.blocks_per_seq) * 4
    return tokens * per_token * element_bytes + seqs * spec.vocab_size * 4 + tables


def plan_memory(
    spec: ModelSpec,
    limits: StepLimits,
    *,
    element_bytes: int,
    weight_bytes: int,
    kv_cache_bytes: int,
    utilization: float,
    num_graphs: int,
    deterministic: bool,
    device: torch.device,
) -> MemoryPlan:
    """Divide the GPU's memory. Weights are allocated already.

    kv_cache_bytes: wanted size of the KV cache; 0 takes what `utilization` of the total leaves.
    Raises MemoryPlanError where not even one sequence of the model's length would fit.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    activations = activation_bytes(spec, limits, element_bytes, deterministic)
    penalties = penalty_table_bytes(limits.max_num_seqs, spec.vocab_size)
    graphs = num_graphs * spec.num_layers * _GRAPH_BYTES_PER_LAYER
    reserved = total_bytes - int(total_bytes * utilization)
    available = free_bytes - reserved - activations - penalties - graphs - _RUNTIME_BYTES
    block_bytes = spec.kv_bytes_per_token(element_bytes) * limits.block_size
    # More KV than every row at full length could use would lie idle.
    useful = (limits.max_num_seqs * limits.blocks_per_seq + 1) * block_bytes
    wanted = kv_cache_bytes or min(available, useful)
    needed = (limits.blocks_per_seq + 1) * block_bytes
    if wanted > available or wanted < needed:
        raise MemoryPlanError(
            "the KV cache",
            max(kv_cache_bytes, needed),
            max(available, 0),
            "lower max_model_len, max_num_seqs or max_num_batched_tokens, or raise"
            " gpu_memory_utilization",
        )
    num_blocks = wanted // block_bytes - 1  # one more is the dummy
    return MemoryPlan(
        total_bytes=total_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activations,
        penalty_bytes=penalties,
        graph_bytes=graphs,
        kv_bytes=(num_blocks + 1) * block_bytes,
        num_blocks=num_blocks,
    )
