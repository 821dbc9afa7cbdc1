"""`ModelWeights`: a decoder's parameters, merged the way runners use them. No device, no file
format.

Matrices are stored [out, in], as linear layers use them. q, k and v are one matrix (rows q | k |
v), gate and up are one (rows gate | up): one large product instead of several small ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine.model.quantized import QuantizedMatrix
from engine.model.spec import ModelSpec

Matrix: TypeAlias = torch.Tensor | QuantizedMatrix

_DUMMY_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. H hidden, I intermediate, Q = heads x head_dim, K = kv heads x head_dim.

    qkv [Q + 2K, H], qkv_bias [Q + 2K] or None, o [H, Q], gate_up [2I, H], down [H, I], attn_norm
    [H], mlp_norm [H], q_norm and k_norm [head_dim] or None.
    """

    qkv: Matrix
    qkv_bias: torch.Tensor | None
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All parameters.

    embedding and lm_head [vocab, H] are the same object when tied; final_norm [H].
    """

    embedding: Matrix
    lm_head: Matrix
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]

    def num_bytes(self) -> int:
        """Bytes of all distinct parameters as they are held now."""
        parts: list[Matrix] = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            parts.append(self.lm_head)
        for layer in self.layers:
            parts.extend(
                value
                for value in (getattr(layer, name) for name in LayerWeights.__slots__)
                if value is not None
            )
        return sum(matrix_bytes(part) for part in parts)


def matrix_bytes(matrix: Matrix) -> int:
    """Bytes that a dense or quantized matrix takes."""
    if isinstance(matrix, QuantizedMatrix):
        return matrix.num_bytes
    return matrix.numel() * matrix.element_size()


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters by `LayerWeights` field; absent parameters are left out."""
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (spec.qkv_size, spec.hidden_size),
        "o": (spec.hidden_size, spec.q_size),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "attn_norm": (spec.hidden_size,),
        "mlp_norm": (spec.hidden_size,),
    }
    if spec.qkv_bias:
        shapes["qkv_bias"] = (spec.qkv_size,)
    if spec.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = (spec.head_dim,)
    return shapes


def named_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every merged parameter; layer parameters as `layers.<i>.<field>`."""
    yield "embedding", (spec.vocab_size, spec.hidden_size)
    if not spec.tied_embeddings:
        yield "lm_head", (spec.vocab_size, spec.hidden_size)
    yield "final_norm", (spec.hidden_size,)
    for index in range(spec.num_layers):
        for field, shape in layer_shapes(spec).items():
            yield f"layers.{index}.{field}", shape


def parameter_count(spec: ModelSpec) -> int:
    """Number of parameters, the embedding counted once when tied."""
    return sum(torch.Size(shape).numel() for _, shape in named_shapes(spec))


def assemble(spec: ModelSpec, tensors: dict[str, Matrix]) -> ModelWeights:
    """Merged parameters by the names of `named_shapes` -> `ModelWeights`.

    Raises KeyError if one is absent.
    """
    layers = []
    for index in range(spec.num_layers):
        fields = {name: tensors[f"layers.{index}.{name}"] for name in layer_shapes(spec)}
        for optional in ("qkv_bias", "q_norm", "k_norm"):
            fields.setdefault(optional, None)  # type: ignore[arg-type]
        layers.append(LayerWeights(**fields))  # type: ignore[arg-type]
    embedding = tensors["embedding"]
    lm_head = embedding if spec.tied_embeddings else tensors["lm_head"]
    final_norm = tensors["final_norm"]
    if isinstance(final_norm, QuantizedMatrix):
        raise TypeError("final_norm must be a dense tensor")
    return ModelWeights(embedding, lm_head, final_norm, tuple(layers))


def dummy_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> ModelWeights:
    """Random parameters at true shapes, for measurements without a checkpoint.

    Norms are ones, biases zeros.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[str, Matrix] = {}
    for name, shape in named_shapes(spec):
        if name.endswith("norm"):
            tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        elif name.endswith("bias"):
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            values = torch.empty(shape, dtype=dtype, device=device)
            tensors[name] = values.normal_(0.0, _DUMMY_SCALE, generator=generator)
    return assemble(spec, tensors)
