"""GGUF metadata -> a `tokenizers.Tokenizer`. Knows the vocabularies `gpt2` (byte-level BPE) and
`llama` (SentencePiece BPE with scores) and the pre-tokenizers named below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tokenbus.errors import Unsupported

_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched whole in the prompt

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def tokenizer_from_gguf(meta: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer. Another vocabulary or pre-tokenizer is Unsupported, and named."""
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta)
    else:
        raise Unsupported(f"GGUF tokenizer model {kind!r} is not supported", field="model")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    for token_id, token_type in enumerate(meta.get("tokenizer.ggml.token_type", [])):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added = AddedToken(tokens[token_id], special=special, normalized=False)
            tokenizer.add_special_tokens([added]) if special else tokenizer.add_tokens([added])
    _add_bos(tokenizer, meta, default=kind == "llama")
    return tokenizer


def _byte_level(meta: dict[str, Any]) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        message = f"GGUF pre-tokenizer {pre!r} is not supported; known: {known}"
        raise Unsupported(message, field="model")
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    ignore_merges = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    scores: list[float] = meta["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab,
        _merges_by_score(tokens, scores, vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _merges_by_score(
    tokens: list[str], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair with the best-scored result: that order, as a list."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


def _add_bos(tokenizer: Tokenizer, meta: dict[str, Any], default: bool) -> None:
    bos_id = meta.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not meta.get("tokenizer.ggml.add_bos_token", default):
        return
    bos = meta["tokenizer.ggml.tokens"][bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", special_tokens=[(bos, bos_id)]
    )
