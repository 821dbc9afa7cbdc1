"""Frames of the ZeroMQ door: encode, and decode with every check.

Knows the frame layout, the message types, the size caps and the msgpack subset. Knows nothing of
sockets, nor of what the fields of a body mean (`bodies.py` and `parse.py` do).

A message is `[head, body, blob...]`: head = b"TB", major version, type; body = one msgpack map;
blobs = raw bytes that the body names by index. Whatever bytes come in, `decode` returns a `Message`
or raises one of BadFrame, VersionMismatch, TooLarge and Unsupported, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack  # type: ignore[import-untyped]

from tokenbus.errors import BadFrame, TooLarge, Unsupported, VersionMismatch

MAGIC = b"TB"
MAJOR = 1
HEAD_BYTES = 4

MAX_KEY_BYTES = 32
_SHORT_KEY_CHARS = MAX_KEY_BYTES // 4  # no character of UTF-8 is longer than 4 bytes
MAX_DEPTH = 6  # containers inside each other, the body's own map included
MAX_INT = 2**53 - 1  # what a double, and so every language, holds exactly


class MessageType(IntEnum):
    """Fourth byte of the head. `c` is the client, `w` the worker."""

    HELLO = 1  # c -> w: first message of a connection
    WELCOME = 2  # w -> c
    SUBMIT = 3  # c -> w
    ACCEPTED = 4  # w -> c
    REJECTED = 5  # w -> c: the job was not taken; nothing follows
    TOKENS = 6  # w -> c: one per client and step
    DONE = 7  # w -> c: terminal
    ERROR = 8  # w -> c: terminal with `job`; without it, about the connection
    CANCEL = 9  # c -> w
    RESUME = 10  # c -> w
    CREDIT = 11  # c -> w
    PING = 12  # both
    PONG = 13  # both
    STATS = 14  # c -> w: question; w -> c: answer
    DRAIN = 15  # w -> c: takes no new jobs


_TYPES = {int(kind): kind for kind in MessageType}
_HEADS = {kind: b"TB" + bytes((MAJOR, kind)) for kind in MessageType}


@dataclass(frozen=True, slots=True)
class Limits:
    """Size caps of one side. A worker states its own in WELCOME."""

    max_body_bytes: int = 1 << 20
    max_frame_bytes: int = 16 << 20
    max_blobs: int = 4


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Message:
    """One decoded message. `body` obeys the msgpack subset; its fields are not checked yet."""

    type: MessageType
    body: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


def encode(
    kind: MessageType,
    body: Mapping[str, object],
    blobs: Sequence[bytes] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> list[bytes]:
    """Frames of one message. Raises TooLarge over a cap, BadFrame if the body is outside the
    msgpack subset.
    """
    try:
        packed: bytes = msgpack.packb(body, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadFrame(f"body cannot be packed: {error}") from error
    _check_sizes(packed, blobs, limits)
    _unpack(packed)
    return [head(kind), packed, *blobs]


def encode_trusted(kind: MessageType, body: Mapping[str, object]) -> list[bytes]:
    """As `encode`, without checks: for bodies that our own code built from checked values, on the
    hot path.
    """
    return [_HEADS[kind], msgpack.packb(body, use_bin_type=True)]


def head(kind: MessageType, major: int = MAJOR) -> bytes:
    """First frame of a message."""
    return b"TB" + bytes((major, kind))


def decode(
    frames: Sequence[bytes],
    limits: Limits = DEFAULT_LIMITS,
    checked_later: Container[MessageType] = (),
) -> Message:
    """Check and decode the frames of one message (without a ROUTER's routing id).

    checked_later: types whose reader checks every value it uses, so that depth and number ranges
    need no pass of their own (TOKENS, on a client).
    Raises BadFrame, VersionMismatch, TooLarge, or Unsupported for an unknown type.
    """
    kind = _check_head(frames, limits)
    body = _unpack(bytes(frames[1]), check_values=kind not in checked_later)
    return Message(kind, body, tuple(map(bytes, frames[2:])))


def peek_type(frames: Sequence[bytes]) -> int:
    """Type byte of a message that may be malformed; 0 if there is none. For counters and logs."""
    return frames[0][3] if frames and len(frames[0]) == HEAD_BYTES else 0


def _check_head(frames: Sequence[bytes], limits: Limits) -> MessageType:
    if len(frames) < 2:
        raise BadFrame(f"expected a head and a body frame, got {len(frames)} frame(s)")
    first = bytes(frames[0])
    if len(first) != HEAD_BYTES:
        raise BadFrame(f"head frame has {len(first)} bytes, expected {HEAD_BYTES}")
    if first[:2] != MAGIC:
        raise BadFrame(f"head starts with {first[:2].hex()}, expected {MAGIC.hex()} ('TB')")
    if first[2] != MAJOR:
        raise VersionMismatch(f"peer speaks major version {first[2]}, offered here: [{MAJOR}]")
    _check_sizes(frames[1], frames[2:], limits)
    kind = _TYPES.get(first[3])
    if kind is None:
        raise Unsupported(f"unknown message type {first[3]}", field="type")
    return kind


def _check_sizes(body: bytes, blobs: Sequence[bytes], limits: Limits) -> None:
    if len(body) > limits.max_body_bytes:
        raise TooLarge(f"body has {len(body)} bytes, the limit is {limits.max_body_bytes}")
    if len(blobs) > limits.max_blobs:
        raise TooLarge(f"message has {len(blobs)} blobs, the limit is {limits.max_blobs}")
    for index, blob in enumerate(blobs):
        if len(blob) > limits.max_frame_bytes:
            size = len(blob)
            raise TooLarge(f"blob {index} has {size} bytes, the limit is {limits.max_frame_bytes}")


def unpack_map(packed: bytes, max_bytes: int = DEFAULT_LIMITS.max_frame_bytes) -> dict[str, Any]:
    """One msgpack map in the subset, outside a frame (the `body` field of a Redis entry)."""
    if len(packed) > max_bytes:
        raise TooLarge(f"body has {len(packed)} bytes, the limit is {max_bytes}")
    return _unpack(packed)


def _unpack(packed: bytes, *, check_values: bool = True) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(
            packed,
            raw=False,
            use_list=True,
            strict_map_key=False,  # the hook names the key at fault
            object_pairs_hook=_map_from_pairs,
            ext_hook=_refuse_ext,
        )
    except BadFrame:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"body is not valid msgpack: {type(error).__name__}: {error}") from error
    if type(value) is not dict:
        raise BadFrame(f"body is a {_msgpack_name(value)}, expected a map")
    if check_values:
        try:
            _check_values(value.values(), 1)
        except BadFrame:
            for key, item in value.items():
                _check_field(key, item)
            raise
    return value


def _map_from_pairs(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        if type(key) is not str:
            raise BadFrame(f"map key is a {_msgpack_name(key)}, expected a string")
        if len(key) > _SHORT_KEY_CHARS and len(key.encode()) > MAX_KEY_BYTES:
            raise BadFrame(f"map key {key[:40]!r} is longer than {MAX_KEY_BYTES} bytes")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise BadFrame("map has a duplicate key")
    return result


def _refuse_ext(code: int, data: bytes) -> object:
    raise BadFrame(f"ext type {code} is not in the subset")


def _check_field(key: str, value: Any) -> None:
    """Of a body that is known to be bad: if it is this field, say so."""
    try:
        _check_values((value,), 1)
    except BadFrame as error:
        raise BadFrame(f"{key[:40]}: {error.message}", field=key[:40]) from error


def _check_values(values: Any, depth: int) -> None:
    """Depth, integer range and floats of one container's values; `depth` counts the container
    itself.
    """
    for value in values:
        kind = type(value)
        if kind is str or kind is bool or value is None or kind is bytes:
            continue
        if kind is int:
            if not -MAX_INT <= value <= MAX_INT:
                raise BadFrame(f"integer {value} is outside +-(2^53-1)")
        elif kind is float:
            if not math.isfinite(value):
                raise BadFrame(f"{value} is not a finite number")
        elif kind is list or kind is dict:
            if depth >= MAX_DEPTH:
                raise BadFrame(f"body is nested deeper than {MAX_DEPTH}")
            _check_values(value.values() if kind is dict else value, depth + 1)
        else:
            raise BadFrame(f"a value of type {_msgpack_name(value)} is not in the subset")


def _msgpack_name(value: object) -> str:
    names = {dict: "map", list: "array", str: "string", bytes: "bin", type(None): "nil"}
    return names.get(type(value), type(value).__name__.lower())
