"""The decoder's forward pass on the CPU: hidden states of one step's tokens.

Rotated pairs are neighbours here, not head_dim / 2 apart: `prepare` moves the rows of q and k once,
and rotation becomes one complex product in place. Scores do not change, since q and k move alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from engine.cpu.attention import DecodeAttention
from engine.cpu.compiled import compiled
from engine.cpu.contexts import DecodeContexts
from engine.cpu.kv_cache import KvCache
from engine.cpu.linear import FromResidual, IntoResidual, LinearFactory
from engine.cpu.norm import Residual, RmsNorm, head_norm
from engine.cpu.step_inputs import PromptTile, StepInputs
from engine.model.quantized import QuantizedMatrix
from engine.model.spec import ModelSpec
from engine.model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: FromResidual
    o: IntoResidual
    gate_up: FromResidual
    down: IntoResidual
    qk_norm: torch.Tensor | None  # [q heads + kv heads, head_dim]
    window: int


class Decoder:
    """All layers and the final norm. Holds no state of requests but the cache it is given."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: tuple[LayerWeights, ...],
        final_norm: torch.Tensor,
        cache: KvCache,
        contexts: DecodeContexts,
        make_linear: LinearFactory,
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._contexts = contexts
        self._final_norm = RmsNorm(final_norm, torch.float32)
        self._inverse_frequencies = spec.rope.inverse_frequencies(spec.head_dim)
        self._layers = [
            _prepare_layer(spec, weights, window, make_linear)
            for weights, window in zip(layers, spec.windows, strict=True)
        ]
        self.num_bytes = sum(
            linear.num_bytes
            for layer in self._layers
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )

    def forward(self, embeddings: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Embeddings float32 [T, H] -> normed states of sampled tokens [S, H]."""
        residual = Residual.of(embeddings, self._spec.rms_norm_eps)
        rotation = self._rotation(step.positions)
        attention = None
        if step.decode is not None:
            attention = DecodeAttention(self._spec, step.decode)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(residual).float()
            layer.o.add_to(residual, self._attend(index, layer, qkv, rotation, step, attention))
            layer.down.add_to(residual, _gated(layer.gate_up(residual)))
        return self._final_norm(residual.take(step.sample_tokens))

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """complex64 [T, 1, head_dim / 2]: e^(i * position * frequency)."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        step: StepInputs,
        attention: DecodeAttention | None,
    ) -> torch.Tensor:
        """Projected q | k | v, float32 [T, qkv_size] -> attention output [T, q_size]."""
        spec = self._spec
        rotated_heads = spec.num_heads + spec.num_kv_heads
        if layer.qk_norm is not None:
            heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
            head_norm(heads[:, :rotated_heads], layer.qk_norm, spec.rms_norm_eps)
        _rotate(qkv, rotation, rotated_heads)
        array = qkv.numpy().reshape(qkv.shape[0], -1, spec.head_dim)
        self._cache.write(index, step.kv_index, array[:, spec.num_heads :])
        parts = []
        if attention is not None:
            rows = array[: attention.num_rows]
            k, v = self._contexts.layer(index, rows[:, spec.num_heads :])
            parts.append(attention(rows, k, v, layer.window))
        for tile in step.tiles:
            part = qkv[tile.start : tile.start + tile.length].view(tile.length, -1, spec.head_dim)
            parts.append(self._tile_attention(index, layer.window, part, tile))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tile_attention(
        self, index: int, window: int, heads: torch.Tensor, tile: PromptTile
    ) -> torch.Tensor:
        """Heads q | k | v, float32 [n, q + 2 * kv heads, head_dim] -> [n, q_size]."""
        spec = self._spec
        q = heads[:, : spec.num_heads].transpose(0, 1)[None]
        if tile.piece_index is None:
            kv = heads[:, spec.num_heads :].transpose(0, 1)[None]
            k, v = kv.chunk(2, dim=1)
        else:
            both = self._cache.gather(index, tile.piece_index, spec.num_kv_heads)
            k, v = both[:, None, :, : tile.context]
        mask = tile.masks[window]
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(tile.length, spec.q_size)


@compiled
def _rotate(qkv: torch.Tensor, rotation: torch.Tensor, num_heads: int) -> None:
    """Rotate the first heads in place. float32 [T, ..], complex64 [T, 1, head_dim / 2]."""
    pairs = torch.view_as_complex(qkv.view(qkv.size(0), -1, rotation.size(2), 2))
    pairs[:, :num_heads].mul_(rotation)


@compiled
def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """gate | up [T, 2I] -> silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate).mul_(up)


def _prepare_layer(
    spec: ModelSpec, weights: LayerWeights, window: int, make_linear: LinearFactory
) -> _Layer:
    order = _paired_order(spec)
    bias = None if weights.qkv_bias is None else weights.qkv_bias[order]
    if isinstance(weights.qkv, QuantizedMatrix):
        qkv = make_linear.normed(weights.qkv.permuted(order), weights.attn_norm, bias)
    else:
        qkv = make_linear.normed(weights.qkv[order], weights.attn_norm, bias)
    qk_norm = None
    if weights.q_norm is not None and weights.k_norm is not None:
        pairs = _pair_neighbours(spec.head_dim)
        q_part = weights.q_norm[pairs].expand(spec.num_heads, -1)
        qk_norm = torch.cat([q_part, weights.k_norm[pairs].expand(spec.num_kv_heads, -1)])
    return _Layer(
        qkv=qkv,
        o=make_linear.added(weights.o),
        gate_up=make_linear.normed(weights.gate_up, weights.mlp_norm),
        down=make_linear.added(weights.down),
        qk_norm=qk_norm,
        window=window,
    )


def _pair_neighbours(head_dim: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Order that makes members i and i + head_dim / 2 of a head neighbours."""
    return np.arange(head_dim).reshape(2, -1).T.reshape(-1)


def _paired_order(spec: ModelSpec) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Row order of the merged projection with neighbouring pairs in q and k; v stays."""
    rotated_heads = spec.num_heads + spec.num_kv_heads
    starts = np.arange(rotated_heads)[:, None] * spec.head_dim
    rotated = (starts + _pair_neighbours(spec.head_dim)).reshape(-1)
    return np.concatenate([rotated, np.arange(len(rotated), spec.qkv_size)])
