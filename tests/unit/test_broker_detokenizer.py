"""Text of output ids: whole characters only, stop strings at every token boundary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.text.detokenizer import Detokenizer
from broker.text.vocabulary import Vocabulary, make_vocabulary

BYTES = make_vocabulary([bytes((i,)) for i in range(256)])  # one token a byte


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def pieces(*tokens: str | bytes) -> Vocabulary:
    return make_vocabulary([t.encode() if isinstance(t, str) else t for t in tokens])


def run(detok: Detokenizer, batches: Sequence[Sequence[int]]) -> tuple[list[str], int]:
    """Texts of the calls until a stop, and the number of ids used."""
    texts, used_ids = [], 0
    for batch in batches:
        text, used = detok.feed(batch)
        texts.append(text)
        used_ids += used
        if detok.is_stopped:
            break
    return texts, used_ids


# ------------------------------------------------------------ characters


def test_an_emoji_in_four_byte_tokens_comes_out_once_and_whole() -> None:
    detok = Detokenizer(BYTES)
    texts, _ = run(detok, [[b] for b in "\U0001f600".encode()])
    assert texts == ["", "", "", "\U0001f600"]
    assert detok.flush() == ""


def test_an_incomplete_character_at_the_end_is_flushed_once() -> None:
    detok = Detokenizer(BYTES)
    assert detok.feed([0x61, 0xF0, 0x9F]) == ("a", 3)
    assert detok.flush() == "\ufffd"
    assert detok.flush() == ""


def test_special_tokens_and_ids_beyond_the_table_add_nothing() -> None:
    detok = Detokenizer(pieces("a", b"", "b"))
    assert detok.feed([0, 1, 2, 99]) == ("ab", 4)


def test_the_first_space_of_sentencepiece_text_is_dropped_once() -> None:
    vocabulary = make_vocabulary([b"", b" Hello", b" world"], strip_leading_space=True)
    texts, _ = run(Detokenizer(vocabulary), [[0], [1], [2], [1]])
    assert texts == ["", "Hello", " world", " Hello"]


@given(st.text(max_size=40), st.data())
def test_text_in_any_cuts_of_its_bytes_equals_the_text(text: str, data: st.DataObject) -> None:
    ids = ids_of(text)
    batches = cut(ids, data)
    detok = Detokenizer(BYTES)
    texts, _ = run(detok, batches)
    assert "".join(texts) + detok.flush() == text
    assert "\ufffd" not in "".join(texts) or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=40), st.data())
def test_random_bytes_decode_as_python_decodes_them_in_one_piece(
    ids: list[int], data: st.DataObject
) -> None:
    detok = Detokenizer(BYTES)
    texts, _ = run(detok, cut(ids, data))
    assert "".join(texts) + detok.flush() == bytes(ids).decode("utf-8", "replace")


# ------------------------------------------------------------ stop strings


STOP_CASES = [
    ("hit across five tokens", ["ABC", "DEF", "G", "HI", "JKL"], ["DEFGHIJ"], "ABC", 5, True),
    ("near miss is released", ["ABC", "DEF", "G", "HI", "X"], ["DEFGHIJ"], "ABCDEFGHIX", 5, False),
    ("inside one token", ["AB", "xSTOPy", "z"], ["STOP"], "ABx", 2, True),
    ("at the very start", ["ST", "OP"], ["STOP"], "", 2, True),
    ("one is a prefix of the other", ["a", "E", "ND", "!"], ["END!", "END"], "a", 3, True),
    ("the longer one comes first", ["a", "EN", "D!"], ["END!", "END"], "a", 3, True),
    ("two in one token: the earlier", ["a", "b2c1"], ["1", "2"], "ab", 2, True),
    ("overlapping starts", ["aa", "aab", "x"], ["aab"], "aa", 2, True),
    ("end of text while held", ["a", "ST"], ["STOP"], "aST", 2, False),
]


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "used", "stopped"),
    [case[1:] for case in STOP_CASES],
    ids=[case[0] for case in STOP_CASES],
)
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_stop_strings(
    tokens: list[str], stops: list[str], text: str, used: int, stopped: bool, batch: int
) -> None:
    detok = Detokenizer(pieces(*tokens), stops)
    ids = list(range(len(tokens)))
    texts, num_used = run(detok, [ids[i : i + batch] for i in range(0, len(ids), batch)])
    assert "".join(texts) + detok.flush() == text
    assert (num_used, detok.is_stopped) == (used, stopped)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    detok = Detokenizer(pieces("x", "S", "T", "Q"), ["STOP"])
    texts, _ = run(detok, [[0], [1], [2], [3], [0]])
    assert texts == ["x", "", "", "STQ", "x"]


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    detok = Detokenizer(pieces("a", "STOP"), ["STOP"], min_tokens=3)
    texts, used = run(detok, [[1, 0, 0, 1, 0]])
    assert ("".join(texts), used, detok.is_stopped) == ("STOPaa", 4, True)


ALPHABET = ["a", "b", "ab", "ba", "\u00e9", "\U0001f600", "c"]


@st.composite
def stop_runs(draw: st.DrawFn) -> tuple[list[bytes], list[str], int]:
    """Token byte strings (characters may be split between tokens), stop strings, min_tokens."""
    text = "".join(draw(st.lists(st.sampled_from(ALPHABET), max_size=14)))
    data = text.encode()
    tokens = []
    while data:
        size = draw(st.integers(1, 4))
        tokens.append(data[:size])
        data = data[size:]
    alphabet = st.sampled_from(["a", "b", "\u00e9", "\U0001f600"])
    stop = st.lists(alphabet, min_size=1, max_size=5).map("".join)
    return tokens, draw(st.lists(stop, min_size=1, max_size=3)), draw(st.integers(0, 4))


def oracle(tokens: list[bytes], stops: list[str], min_tokens: int) -> tuple[str, int, bool]:
    """Search the whole text after each token; matches complete before min_tokens do not count."""
    decoded_before = 0
    for n in range(1, len(tokens) + 1):
        text = whole(b"".join(tokens[:n]))
        starts = [
            at
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > decoded_before
        ]
        if n >= min_tokens and starts:
            return text[: min(starts)], n, True
        decoded_before = len(text)
    return b"".join(tokens).decode("utf-8", "replace"), len(tokens), False


def whole(data: bytes) -> str:
    """The complete characters of valid UTF-8 that may be cut at its end."""
    return data.decode("utf-8", "ignore")


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    """Random consecutive pieces of ids."""
    batches = []
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, 6))
        batches.append(ids[at : at + size])
        at += size
    return batches


@settings(max_examples=400)
@given(stop_runs(), st.data())
def test_stop_strings_agree_with_a_search_of_the_whole_text(
    case: tuple[list[bytes], list[str], int], data: st.DataObject
) -> None:
    tokens, stops, min_tokens = case
    text, used, stopped = oracle(tokens, stops, min_tokens)
    detok = Detokenizer(make_vocabulary(tokens), stops, min_tokens)
    texts, num_used = run(detok, cut(list(range(len(tokens))), data))
    assert (num_used, detok.is_stopped) == (used, stopped)
    assert "".join(texts) + detok.flush() == text


@settings(max_examples=200)
@given(stop_runs(), st.data())
def test_the_text_after_n_tokens_depends_on_those_tokens_only(
    case: tuple[list[bytes], list[str], int], data: st.DataObject
) -> None:
    """One call for all, one a token, any cuts, and a copy in between: the same text is out."""
    tokens, stops, min_tokens = case
    vocabulary = make_vocabulary(tokens)
    one_by_one = Detokenizer(vocabulary, stops, min_tokens)
    shown = [""]
    for i in range(len(tokens)):
        shown.append(shown[-1] + one_by_one.feed([i])[0])
        if one_by_one.is_stopped:
            break
    n = data.draw(st.integers(0, len(shown) - 1))
    at_once = Detokenizer(vocabulary, stops, min_tokens)
    texts, _ = run(at_once, cut(list(range(n)), data))
    assert "".join(texts) == shown[n]
    copied = at_once.copy()
    if not at_once.is_stopped:
        rest = list(range(n, len(tokens)))
        assert copied.feed(rest) == at_once.feed(rest)
