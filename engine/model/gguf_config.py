"""Metadata of a GGUF file -> `ModelSpec`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.model.errors import InvalidConfigError, UnsupportedModelError
from engine.model.spec import ModelSpec, RopeSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id")


def parse_gguf_config(
    metadata: Mapping[str, Any], tensor_names: Collection[str], divisors: tuple[float, ...] = ()
) -> ModelSpec:
    """GGUF key-values (already decoded to Python values) -> `ModelSpec`.

    tensor_names decides tied embeddings (no `output.weight`) and biases. divisors: the values of
    `rope_freqs.weight`, in which llama3 rope scaling is stored.
    Raises UnsupportedModelError for a feature the engine lacks, InvalidConfigError for a missing
    value.
    """
    name = str(metadata.get("general.architecture", "unknown"))
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError("GGUF architecture", name, _ARCHITECTURES)
    if metadata.get(f"{name}.expert_count"):
        count = metadata[f"{name}.expert_count"]
        raise UnsupportedModelError("mixture of experts", f"{count} experts", ["dense models"])
    hidden_size = int(_required(metadata, f"{name}.embedding_length"))
    num_heads = int(_required(metadata, f"{name}.attention.head_count"))
    num_layers = int(_required(metadata, f"{name}.block_count"))
    head_dim = int(metadata.get(f"{name}.attention.key_length") or hidden_size // num_heads)
    _check_head_dims(metadata, name, head_dim)
    window = int(metadata.get(f"{name}.attention.sliding_window") or 0)
    return ModelSpec(
        architecture=_ARCHITECTURES[name],
        hidden_size=hidden_size,
        intermediate_size=int(_required(metadata, f"{name}.feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(metadata.get(f"{name}.attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(metadata, name),
        max_model_len=int(_required(metadata, f"{name}.context_length")),
        rms_norm_eps=float(_required(metadata, f"{name}.attention.layer_norm_rms_epsilon")),
        rope=_rope(metadata, name, divisors),
        windows=(window,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tied_embeddings="output.weight" not in tensor_names,
        eos_token_ids=_eos(metadata),
    )


def _check_head_dims(metadata: Mapping[str, Any], name: str, head_dim: int) -> None:
    value_dim = metadata.get(f"{name}.attention.value_length") or head_dim
    if value_dim != head_dim:
        raise UnsupportedModelError(
            "value head size", value_dim, [f"the key head size, {head_dim}"]
        )
    rotated = metadata.get(f"{name}.rope.dimension_count") or head_dim
    if rotated != head_dim:
        raise UnsupportedModelError("rotated head size", rotated, [f"the whole head, {head_dim}"])


def _vocab_size(metadata: Mapping[str, Any], name: str) -> int:
    size = metadata.get(f"{name}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens") or ())
    if not size:
        raise InvalidConfigError(f"GGUF metadata lacks {name}.vocab_size and tokenizer.ggml.tokens")
    return int(size)


def _rope(metadata: Mapping[str, Any], name: str, divisors: tuple[float, ...]) -> RopeSpec:
    theta = float(metadata.get(f"{name}.rope.freq_base") or 10000.0)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            "rope scaling", kind, ["none", "linear", "rope_freqs.weight (llama3)"]
        )
    if kind == "linear":
        factor = float(_required(metadata, f"{name}.rope.scaling.factor"))
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if divisors:
        return RopeSpec(theta=theta, kind="factors", divisors=divisors)
    return RopeSpec(theta=theta)


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if metadata.get(key) is None:
        raise InvalidConfigError(f"GGUF metadata lacks {key}")
    return metadata[key]
