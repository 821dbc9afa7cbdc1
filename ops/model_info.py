"""What a model is, from its metadata alone (JSON, safetensors or GGUF headers). No torch."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ops.exit_codes import CommandError, ExitCode


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts for `tokenbus model inspect`; `types` counts parameters by storage type."""

    name: str
    path: str
    format: str
    architecture: str
    parameters: int
    size_bytes: int
    types: dict[str, int]
    context_tokens: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    has_chat_template: bool


def inspect(path: Path, name: str) -> ModelInfo:
    """Read a directory's or a .gguf file's metadata. Raises CommandError when it cannot be read."""
    try:
        return (
            _inspect_gguf(path, name) if path.suffix == ".gguf" else _inspect_directory(path, name)
        )
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise CommandError(
            ExitCode.MODEL_UNAVAILABLE,
            f"cannot read {path}: {type(error).__name__}: {error}",
            "The file may be cut short or of another format; fetch it again.",
        ) from error


def _inspect_gguf(path: Path, name: str) -> ModelInfo:
    from engine.loader.gguf_reader import ListSkippingReader

    reader = ListSkippingReader(path)

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    arch = str(value("general.architecture", "unknown"))
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    num_heads = int(value(f"{arch}.attention.head_count", 0))
    return ModelInfo(
        name=name,
        path=str(path),
        format="gguf",
        architecture=arch,
        parameters=types.total(),
        size_bytes=path.stat().st_size,
        types=dict(types.most_common()),
        context_tokens=int(value(f"{arch}.context_length", 0)),
        num_layers=int(value(f"{arch}.block_count", 0)),
        hidden_size=int(value(f"{arch}.embedding_length", 0)),
        num_heads=num_heads,
        num_kv_heads=int(value(f"{arch}.attention.head_count_kv", num_heads)),
        vocab_size=len(tokens.data) if tokens is not None else int(value(f"{arch}.vocab_size", 0)),
        has_chat_template=value("tokenizer.chat_template") is not None,
    )


def _inspect_directory(path: Path, name: str) -> ModelInfo:
    config = json.loads((path / "config.json").read_text())
    shards = sorted(path.glob("*.safetensors"))
    types: Counter[str] = Counter()
    for shard in shards:
        types.update(_safetensors_types(shard))
    num_heads = int(config.get("num_attention_heads", 0))
    return ModelInfo(
        name=name,
        path=str(path),
        format="safetensors",
        architecture=", ".join(
            config.get("architectures") or [config.get("model_type", "unknown")]
        ),
        parameters=types.total(),
        size_bytes=sum(shard.stat().st_size for shard in shards),
        types=dict(types.most_common()),
        context_tokens=int(config.get("max_position_embeddings", 0)),
        num_layers=int(config.get("num_hidden_layers", 0)),
        hidden_size=int(config.get("hidden_size", 0)),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        vocab_size=int(config.get("vocab_size", 0)),
        has_chat_template=_has_chat_template(path),
    )


def _safetensors_types(shard: Path) -> Counter[str]:
    """Parameters by dtype, from the header: 8 bytes of length (little-endian), then JSON."""
    with shard.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > 100 << 20:
            raise ValueError(f"{shard.name}: header of {length} bytes, limit is 100 MiB")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    types: Counter[str] = Counter()
    for tensor in header.values():
        types[tensor["dtype"]] += prod(tensor["shape"])
    return types


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))
