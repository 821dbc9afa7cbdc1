"""Frames: whatever comes in, a message or a typed error comes out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vectors import generate
from tokenbus import bodies
from tokenbus.entries import event_from_entry
from tokenbus.errors import _CLASSES, BadFrame, InvalidField, TokenbusError, TooLarge
from tokenbus.protocol import Limits, MessageType, decode, encode, encode_trusted, head, peek_type

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
KEYS = st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
GOLDEN = [
    [bytes.fromhex(frame) for frame in row["frames"]]
    for row in generate.golden_frames() + generate.malformed()
]
READERS = (
    bodies.Hello.from_body,
    bodies.Welcome.from_body,
    bodies.Accepted.from_body,
    bodies.Resume.from_body,
    bodies.read_cancel,
    bodies.read_credit,
    bodies.read_ping,
    bodies.read_stats_question,
    bodies.tokens_from_body,
    bodies.done_from_body,
    bodies.error_from_body,
    bodies.failed_from_body,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(
    st.sampled_from(MessageType),
    st.dictionaries(KEYS, VALUES, max_size=4).filter(lambda body: depth_of(body) <= 6),
    st.lists(st.binary(max_size=9), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_decodes_to_the_same(
    kind: MessageType, body: dict[str, Any], blobs: list[bytes]
) -> None:
    message = decode(encode(kind, body, blobs))
    assert (kind, body, tuple(blobs)) == (message.type, message.body, message.blobs)


@given(st.lists(st.binary(max_size=40), max_size=7))
@settings(max_examples=300, deadline=None)
def test_random_frames_never_raise_anything_but_a_typed_error(frames: list[bytes]) -> None:
    _decode_or_typed_error(frames)


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_bodies_never_raise_anything_but_a_typed_error(body: bytes) -> None:
    _decode_or_typed_error([head(MessageType.SUBMIT), body])


@given(st.sampled_from(GOLDEN), st.data())
@settings(max_examples=500, deadline=None)
def test_mutated_golden_frames_never_raise_anything_but_a_typed_error(
    frames: list[bytes], data: st.DataObject
) -> None:
    frames = list(frames)
    for _ in range(data.draw(st.integers(1, 4))):
        if not frames:
            break
        index = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[index])
        at = data.draw(st.integers(0, len(frame)))
        change = data.draw(st.sampled_from(["flip", "insert", "cut", "drop"]))
        if change == "flip" and at < len(frame):
            frame[at] = data.draw(st.integers(0, 255))
        elif change == "insert":
            frame[at:at] = data.draw(st.binary(max_size=5))
        elif change == "cut":
            del frame[at:]
        frames[index] = bytes(frame)
        if change == "drop":
            del frames[index]
    _decode_or_typed_error(frames)


@given(st.sampled_from(READERS), st.data())
@settings(max_examples=400, deadline=None)
def test_bodies_of_any_shape_never_raise_anything_but_a_typed_error(
    reader: Any, data: st.DataObject
) -> None:
    """Right keys with wrong values, for every message there is."""
    names = "client credit versions tenant agent job after total t events seq reason usage crc code message retry worker boot limits models heartbeat_ms version text attempt"  # noqa: E501
    body = data.draw(st.dictionaries(st.sampled_from(names.split()), VALUES, max_size=8))
    with suppress(TokenbusError):
        reader(body)


@given(
    st.text(max_size=12) | st.from_regex(r"[0-9]{1,3}-[0-9]{1,3}", fullmatch=True),
    st.dictionaries(
        st.sampled_from(
            [b"event", b"seq", b"ids", b"text", b"reason", b"usage", b"crc", b"code", b"seed"]
        ),
        st.binary(max_size=12)
        | st.sampled_from([b"tokens", b"done", b"started", b"error", b"1", b"[1]", b"{}", b"stop"]),
    ),
)
@settings(max_examples=400, deadline=None)
def test_out_entries_of_any_shape_never_raise_anything_but_a_typed_error(
    entry: str, fields: dict[bytes, bytes]
) -> None:
    with suppress(TokenbusError):
        event_from_entry("j", entry, fields)


def test_a_body_that_cannot_be_packed_is_a_bad_frame() -> None:
    for value in (object(), 2**70, {1: 2}, float("nan"), "\ud800", {"k": b""} | {"x" * 33: 1}):
        with pytest.raises(BadFrame):
            encode(MessageType.PING, {"t": value})


@pytest.mark.parametrize("value", [float("nan"), 2**60, [1, [float("inf")]]])
def test_a_value_outside_the_subset_is_answered_with_the_field_it_is_in(value: object) -> None:
    packed = msgpack.packb({"job": "j", "temperature": value})
    with pytest.raises(BadFrame, match=r"^temperature: ") as caught:
        decode([head(MessageType.SUBMIT), packed])
    assert caught.value.field == "temperature"


def test_limits_hold_on_both_ways() -> None:
    limits = Limits(max_body_bytes=10, max_frame_bytes=4, max_blobs=1)
    for body, blobs in (({"t": "x" * 20}, []), ({}, [b"12345"]), ({}, [b"", b""])):
        with pytest.raises(TooLarge):
            encode(MessageType.PING, body, blobs, limits)
        with pytest.raises(TooLarge):
            decode([head(MessageType.PING), msgpack.packb(body), *blobs], limits)


def test_the_unchecked_encoder_writes_the_same_bytes() -> None:
    body = {"events": [["j", 1, 1, [5], "a"]]}
    assert encode(MessageType.TOKENS, body) == encode_trusted(MessageType.TOKENS, body)


def test_the_type_of_a_malformed_message_can_be_looked_at() -> None:
    assert [peek_type([]), peek_type([b"x"]), peek_type([b"XX\x01\x0c"])] == [0, 0, 12]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "client"),
        ({"client": "short"}, "client"),
        ({"client": "x" * 65}, "client"),
        ({"client": "x" * 20 + "\n"}, "client"),
        ({"client": "x" * 20, "credit": -1}, "credit"),
        ({"client": "x" * 20, "credit": True}, "credit"),
        ({"client": "x" * 20, "credit": 1.0}, "credit"),
        ({"client": "x" * 20, "versions": "1"}, "versions"),
        ({"client": "x" * 20, "versions": []}, "versions"),
        ({"client": "x" * 20, "tenant": "a b"}, "tenant"),
        ({"client": "x" * 20, "agent": "x" * 65}, "agent"),
    ],
)
def test_a_hello_with_a_bad_field_names_it(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        bodies.Hello.from_body(body)
    assert path == caught.value.field


def test_an_error_keeps_its_class_and_details_over_the_wire() -> None:
    for cls in _CLASSES.values():
        error = cls("what\ud800" + "é" * 600, field="a[1].b", retry_ms=5)
        body = bodies.error_to_body(error, job="j")
        read = bodies.error_from_body(decode(encode(MessageType.ERROR, body)).body)
        assert type(error) is type(read)
        assert (error.retry, error.field, 5) == (read.retry, read.field, read.retry_ms)
        assert len(read.message.encode()) <= bodies.MAX_MESSAGE_BYTES


def test_an_unknown_code_is_an_internal_error_that_keeps_the_peers_word() -> None:
    error = bodies.error_from_body({"code": "later", "message": "m", "retry": True})
    assert (error.code, error.message, error.retry) == ("internal", "later: m", True)


def _decode_or_typed_error(frames: list[bytes]) -> None:
    code = ""
    try:
        message = decode(frames)
    except TokenbusError as error:
        code = error.code
    else:
        assert message.body == decode(encode(message.type, message.body, message.blobs)).body
    assert code in ("", "bad_frame", "version", "too_large", "unsupported")
