"""`ModelSpec`: every fact about a decoder model that the engine needs, as frozen values.

Knows the four supported families and how attention windows and rope scaling follow from their
settings; knows no file format. `engine.model.hf_config` and `engine.model.gguf_config` fill it in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from engine.model.errors import InvalidConfigError

RopeKind = Literal["default", "linear", "llama3", "factors"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu",)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base `theta` and how its frequencies are stretched for long contexts.

    linear divides all frequencies by `factor`; llama3 divides the low ones, with a smooth band
    between `original_max_len / high_freq_factor` and `original_max_len / low_freq_factor`
    wavelengths; factors divides frequency i by `divisors[i]` (the form in which a GGUF file stores
    llama3 scaling).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    divisors: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 [head_dim / 2]: radians per position of each rotated pair."""
        base = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "factors":
            return base / torch.tensor(self.divisors, dtype=torch.float32)
        return base

    def _llama3(self, base: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / base
        low = self.original_max_len / self.low_freq_factor
        high = self.original_max_len / self.high_freq_factor
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_len / wavelength - self.low_freq_factor) / span
        blended = (1 - smooth) * base / self.factor + smooth * base
        stretched = torch.where(wavelength > low, base / self.factor, base)
        return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-like decoder: pre-norm, grouped-query attention with rotary positions, gated SiLU
    MLP.

    windows: one entry a layer; 0 means full attention, W > 0 that a position sees itself and the W
    - 1 before it. tied_embeddings: the LM head is the embedding matrix. dtype: the checkpoint's own
    number format.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfigError(
                f"num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InvalidConfigError(
                f"head_dim {self.head_dim} is odd; rotary embedding rotates pairs"
            )
        if len(self.windows) != self.num_layers:
            raise InvalidConfigError(
                f"{len(self.windows)} attention windows for {self.num_layers} layers"
            )
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise InvalidConfigError(
                f"{len(self.rope.divisors)} rope frequency factors for head_dim {self.head_dim}"
            )

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the merged projection, in the order q | k | v."""
        return self.q_size + 2 * self.kv_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """KV cache bytes that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes
