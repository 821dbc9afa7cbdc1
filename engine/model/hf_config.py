"""config.json (+ generation_config.json) of a Hugging Face directory -> `ModelSpec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.model.errors import InvalidConfigError, UnsupportedModelError
from engine.model.spec import ACTIVATIONS, ARCHITECTURES, ROPE_KINDS, ModelSpec, RopeSpec

_MISTRAL_DEFAULT_WINDOW = 4096


def read_hf_spec(directory: Path) -> ModelSpec:
    """Parse a model directory's configuration.

    Raises UnsupportedModelError for a feature the engine lacks, InvalidConfigError for a missing or
    contradictory value or a file that is no JSON object.
    """
    config = _read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_hf_config(config, generation)


def parse_hf_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """config.json's object and generation_config.json's (or None) -> `ModelSpec`.

    Raises as `read_hf_spec`.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    hidden_size = _positive_int(config, "hidden_size")
    num_heads = _positive_int(config, "num_attention_heads")
    num_layers = _positive_int(config, "num_hidden_layers")
    eos = (generation or {}).get("eos_token_id")
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(
            config.get("head_dim") or _default_head_dim(architecture, hidden_size, num_heads)
        ),
        vocab_size=_positive_int(config, "vocab_size"),
        max_model_len=_positive_int(config, "max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        windows=_windows(config, architecture, num_layers),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_id_tuple(eos if eos is not None else config.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or f"model_type {config.get('model_type', 'unknown')}"
    raise UnsupportedModelError("architecture", found, ARCHITECTURES)


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown")
            if isinstance(quantization, dict)
            else quantization
        )
        raise UnsupportedModelError("quantization", method, ["none", "GGUF files"])
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError("activation", activation, ACTIVATIONS)
    if architecture != "Qwen2ForCausalLM" and config.get("attention_bias"):
        raise UnsupportedModelError("attention_bias", True, [False])
    if config.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias", True, [False])


def _rope(config: dict[str, Any]) -> RopeSpec:
    params = dict(config.get("rope_parameters") or {})
    params.update(config.get("rope_scaling") or {})
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError("rope scaling", kind, ROPE_KINDS)
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial is not None and float(partial) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", partial, [1.0])
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = float(_required(params, "factor", "rope_scaling.factor"))
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=float(_required(params, "low_freq_factor", "rope_scaling.low_freq_factor")),
        high_freq_factor=float(
            _required(params, "high_freq_factor", "rope_scaling.high_freq_factor")
        ),
        original_max_len=int(
            params.get("original_max_position_embeddings")
            or _positive_int(config, "max_position_embeddings")
        ),
    )


def _windows(config: dict[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window", 0)
    if architecture == "MistralForCausalLM":
        window = config.get("sliding_window", _MISTRAL_DEFAULT_WINDOW)
        return (int(window or 0),) * num_layers
    if architecture == "LlamaForCausalLM" or not config.get("use_sliding_window") or not window:
        return (0,) * num_layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    first = int(config.get("max_window_layers", 28))
    return tuple(int(window) if layer >= first else 0 for layer in range(num_layers))


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        return 128
    if hidden_size % num_heads:
        raise InvalidConfigError(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _id_tuple(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(int(v) for v in value)
    return (int(str(value)),)


def _required(values: dict[str, Any], key: str, name: str) -> Any:
    if values.get(key) is None:
        raise InvalidConfigError(f"config.json lacks {name}")
    return values[key]


def _positive_int(config: dict[str, Any], key: str) -> int:
    value = _required(config, key, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidConfigError(f"{path} does not exist") from error
    except ValueError as error:
        raise InvalidConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidConfigError(f"{path} holds {type(value).__name__}, expected an object")
    return value
