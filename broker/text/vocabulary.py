"""What each token id adds to the text, as bytes. Knows the two decoders that language models use.

Both are concatenations, so the text of a run is the concatenation of its tokens' bytes, read as
UTF-8: one table lookup a token, whatever the length of the output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tokenbus.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes[id]: what the id adds, b"" for special tokens. texts[id]: the same as str, or
    None where it is not whole UTF-8 by itself. strip_leading_space: the text's first space is
    dropped (SentencePiece puts one before every word). Ids beyond the table add nothing.
    """

    token_bytes: Sequence[bytes]
    texts: Sequence[str | None]
    strip_leading_space: bool = False

    @property
    def size(self) -> int:
        """Number of ids in the table."""
        return len(self.token_bytes)


def make_vocabulary(token_bytes: Sequence[bytes], strip_leading_space: bool = False) -> Vocabulary:
    """Table with the str of each entry added."""
    return Vocabulary(tuple(token_bytes), tuple(map(_whole_text, token_bytes)), strip_leading_space)


def letters(vocab_size: int) -> Vocabulary:
    """The fake model's text: one letter a token, `a` for id 0, and again from `a` after `z`."""
    return make_vocabulary([bytes((97 + i % 26,)) for i in range(vocab_size)])


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The table of a tokenizer. A decoder that is no concatenation is Unsupported, and named."""
    spec = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    pieces: list[str] = [""] * size
    for piece, i in tokenizer.get_vocab(with_added_tokens=True).items():
        pieces[i] = piece
    kinds = _decoder_kinds(spec.get("decoder"))
    if "ByteLevel" in kinds:
        decode = _byte_level_bytes
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        decode = _sentencepiece_bytes
    else:
        named = " + ".join(kinds) or "none"
        raise Unsupported(f"tokenizer decoder {named} is not supported", field="model")
    table = [b"" if i in special else decode(piece) for i, piece in enumerate(pieces)]
    return make_vocabulary(table, strip_leading_space=_strips_space(spec.get("decoder")))


def byte_to_char() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(plain))
    return table


_CHAR_TO_BYTE = {char: byte for byte, char in byte_to_char().items()}


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_CHAR_TO_BYTE[char] for char in piece)
    except KeyError:  # an added token, kept as plain text
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes((int(piece[3:5], 16),))
    return piece.replace("\u2581", " ").encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [str(decoder["type"])]


def _strips_space(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_strips_space(part) for part in decoder["decoders"])
    if decoder["type"] == "Strip":
        return bool(decoder["content"] == " " and decoder["start"] > 0)
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return False


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
