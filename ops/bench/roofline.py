"""The floor beside a decode number: bytes over bandwidth, operations over arithmetic rate.

Ceilings as measured on one H200: 4.12 TB/s device copy, 790 TFLOP/s bf16.
"""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.loader import read_spec
from engine.model.spec import ModelSpec

BYTES_PER_S = 4.12e12
FLOP_PER_S = 790e12
_ELEMENT_BYTES = 2


def linear_parameters(spec: ModelSpec) -> int:
    """Weights that one decode step reads: all linear layers and the LM head, not the embedding."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    per_layer = hidden * (spec.qkv_size + spec.q_size + 3 * inner)
    return spec.num_layers * per_layer + spec.vocab_size * hidden


def decode_floor_tok_s(config: EngineConfig, batch_size: int, context_len: int) -> float:
    """Most tokens per second that batch_size rows of this context length can decode (bf16)."""
    spec = read_spec(Path(config.model_path))
    parameters = linear_parameters(spec)
    linear_s = max(
        parameters * _ELEMENT_BYTES / BYTES_PER_S, 2 * parameters * batch_size / FLOP_PER_S
    )
    kv_bytes = batch_size * context_len * spec.kv_bytes_per_token(_ELEMENT_BYTES)
    return round(batch_size / (linear_s + kv_bytes / BYTES_PER_S), 1)
