"""Everything the broker knows of one model: tokenizer, chat template, defaults, lengths.

Loads from a Hugging Face directory, a GGUF file, or nothing (the fake model). No weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from broker.text.chat import ChatTemplate
from broker.text.gguf_metadata import read_metadata
from broker.text.gguf_tokenizer import tokenizer_from_gguf
from broker.text.vocabulary import Vocabulary, letters, vocabulary_of
from tokenbus.errors import Unsupported

IntArray = npt.NDArray[np.int32]
NO_LENGTH_KNOWN = 1 << 30  # the engine's own limit follows with its READY


class Encoder(Protocol):
    """Text -> token ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> IntArray:
        """int32 [P]. add_special_tokens: begin-of-sequence and the like, as the tokenizer says."""
        ...


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling defaults of the model (generation_config.json); greedy where it gives none."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextModel:
    """vocab_size counts the ids allowed in a prompt; max_model_len, prompt and output tokens."""

    encoder: Encoder
    vocabulary: Vocabulary
    chat: ChatTemplate | None
    defaults: Defaults
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int


class BpeEncoder:
    """Any `tokenizers.Tokenizer`. Thread-safe; releases the GIL while it works."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> IntArray:
        """See `Encoder`."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)


class ByteEncoder:
    """The fake model's: one token a byte, modulo the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool) -> IntArray:
        """See `Encoder`; there are no special tokens."""
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return ids if self._vocab_size >= 256 else ids % self._vocab_size


def load_text_model(path: str, fake_vocab_size: int = 0) -> TextModel:
    """The text side of a model. Raises Unsupported, naming what is missing or not known."""
    if fake_vocab_size > 0:
        return _fake(fake_vocab_size)
    location = Path(path)
    if not location.exists():
        raise Unsupported(f"{path}: no such file or directory", field="model")
    return _from_directory(location) if location.is_dir() else _from_gguf(location)


def _fake(vocab_size: int) -> TextModel:
    return TextModel(
        encoder=ByteEncoder(vocab_size),
        vocabulary=letters(vocab_size),
        chat=ChatTemplate(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:", {}
        ),
        defaults=Defaults(),
        eos_token_ids=(),
        vocab_size=vocab_size,
        max_model_len=NO_LENGTH_KNOWN,
    )


def _from_gguf(path: Path) -> TextModel:
    meta = read_metadata(path)
    tokenizer = tokenizer_from_gguf(meta)
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            word = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{word}_token"] = tokens[token_id]
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    template = meta.get("tokenizer.chat_template")
    architecture = meta.get("general.architecture", "")
    return TextModel(
        encoder=BpeEncoder(tokenizer),
        vocabulary=vocabulary_of(tokenizer),
        chat=ChatTemplate(template, special) if template else None,
        defaults=Defaults(),
        eos_token_ids=tuple(dict.fromkeys(e for e in ends if e is not None)),
        vocab_size=len(tokens),
        max_model_len=int(meta.get(f"{architecture}.context_length", NO_LENGTH_KNOWN)),
    )


def _from_directory(path: Path) -> TextModel:
    if not (path / "tokenizer.json").is_file():
        raise Unsupported(f"{path}: has no tokenizer.json", field="model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _read_json(path / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = _read_json(path / "generation_config.json")
    settings = _read_json(path / "tokenizer_config.json")
    special = _special_tokens(settings)
    template = _template_of(path, settings)
    vocabulary = vocabulary_of(tokenizer)
    return TextModel(
        encoder=BpeEncoder(tokenizer),
        vocabulary=vocabulary,
        chat=ChatTemplate(template, special) if template else None,
        defaults=_defaults(generation),
        eos_token_ids=_eos_ids(tokenizer, generation, config, special),
        vocab_size=int(config.get("vocab_size", vocabulary.size)),
        max_model_len=int(config.get("max_position_embeddings", NO_LENGTH_KNOWN)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise Unsupported(f"{path}: expected a JSON object", field="model")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _template_of(path: Path, settings: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(
    tokenizer: Tokenizer,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    special: Mapping[str, str],
) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    token_id = tokenizer.token_to_id(special.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _defaults(generation: Mapping[str, Any]) -> Defaults:
    blank = Defaults(repetition_penalty=_repetition_penalty(generation))
    if generation.get("do_sample") is False:  # greedy; a penalty acts on that too
        return blank
    return Defaults(
        temperature=float(generation.get("temperature") or blank.temperature),
        top_p=float(generation.get("top_p") or blank.top_p),
        top_k=max(0, int(generation.get("top_k") or blank.top_k)),
        min_p=float(generation.get("min_p") or blank.min_p),
        repetition_penalty=blank.repetition_penalty,
    )


def _repetition_penalty(generation: Mapping[str, Any]) -> float:
    value = generation.get("repetition_penalty")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        message = f"generation_config.json: repetition_penalty is {value!r}, expected above 0"
        raise Unsupported(message, field="model")
    return float(value)
