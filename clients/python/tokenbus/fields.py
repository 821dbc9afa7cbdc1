"""Checks of single request fields: type, range, length. Every failure names the field's path.

Values come as msgpack or JSON gives them. bool is never taken for int, NaN and infinities are
refused, and numbers are never read from strings here (`flat.py` turns the flat strings of a Redis
entry into values first).
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Mapping
from typing import Any

from tokenbus.errors import InvalidField, TooLarge, Unsupported
from tokenbus.request import Priority

MAX_TEXT_BYTES = 1 << 20  # prompt, or all message contents together
MAX_IDS = 4 << 20  # token ids of one prompt: one blob of 16 MiB
MAX_MESSAGES = 1_024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TOKEN_ID = 2**31 - 1
MAX_DEADLINE_MS = 7 * 24 * 3_600_000
ROLES = ("system", "developer", "user", "assistant", "tool")
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

_JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_TENANT = re.compile(r"[A-Za-z0-9._:-]{0,64}\Z")
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,128}\Z")
_QUEUE = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_MODEL = re.compile(r"[!-~]{1,256}\Z")


def type_name(value: object) -> str:
    """Word for a value's type in messages to people."""
    names = {
        dict: "map",
        list: "array",
        str: "string",
        bytes: "bin",
        type(None): "null",
        int: "integer",
    }
    return names.get(type(value), type(value).__name__)


def wrong_type(path: str, expected: str, value: object) -> InvalidField:
    """The error for a value of another type."""
    return InvalidField(f"{path}: expected {expected}, got {type_name(value)}", field=path)


def read_int(path: str, value: object, low: int, high: int) -> int:
    """An integer in low..high."""
    if type(value) is not int:
        raise wrong_type(path, "an integer", value)
    if not low <= value <= high:
        raise InvalidField(f"{path}: {value} is not in {low}..{high}", field=path)
    return value


def read_float(
    path: str, value: object, low: float, high: float, *, above_low: bool = False
) -> float:
    """A finite number in low..high, or in (low, high] with above_low. Integers count as numbers."""
    if type(value) is not float and type(value) is not int:
        raise wrong_type(path, "a number", value)
    if type(value) is float and not math.isfinite(value):
        raise InvalidField(f"{path}: {value} is not a finite number", field=path)
    if not low <= value <= high or (above_low and value == low):
        bracket = "(" if above_low else "["
        raise InvalidField(f"{path}: {value} is not in {bracket}{low}, {high}]", field=path)
    return float(value)


def read_bool(path: str, value: object) -> bool:
    """true or false, nothing that merely looks like it."""
    if type(value) is not bool:
        raise wrong_type(path, "a boolean", value)
    return value


def read_str(path: str, value: object, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """A string that is valid UTF-8, without lone surrogates."""
    if type(value) is not str:
        raise wrong_type(path, "a string", value)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidField(f"{path}: not valid Unicode ({error.reason})", field=path) from None
    if size > max_bytes:
        raise TooLarge(f"{path}: {size} bytes, the limit is {max_bytes}", field=path)
    return value


def read_prompt(path: str, value: object) -> str:
    """A prompt with at least one character."""
    text = read_str(path, value)
    if not text:
        raise InvalidField(f"{path}: is empty", field=path)
    return text


def read_matching(path: str, value: object, pattern: re.Pattern[str], rule: str) -> str:
    """A string that matches a pattern; `rule` is the pattern in words."""
    text = read_str(path, value)
    if not pattern.match(text):
        raise InvalidField(f"{path}: {text[:80]!r} is not {rule}", field=path)
    return text


def read_job_id(path: str, value: object) -> str:
    """A job id."""
    return read_matching(path, value, _JOB_ID, "1-128 characters of [A-Za-z0-9._:-]")


def read_tenant(path: str, value: object) -> str:
    """A tenant name, "" for none."""
    return read_matching(path, value, _TENANT, "0-64 characters of [A-Za-z0-9._:-]")


def read_idempotency_key(path: str, value: object) -> str:
    """An idempotency key."""
    return read_matching(path, value, _IDEMPOTENCY_KEY, "1-128 printable ASCII characters")


def read_model(path: str, value: object) -> str:
    """A model name."""
    return read_matching(path, value, _MODEL, "1-256 printable ASCII characters")


def read_queue(path: str, value: object) -> str:
    """A queue's name."""
    return read_matching(path, value, _QUEUE, "1-64 characters of [A-Za-z0-9._-]")


def read_priority(path: str, value: object) -> Priority:
    """high, normal or low."""
    for name in PRIORITIES:
        if value == name:
            return name
    raise InvalidField(f"{path}: expected one of {', '.join(PRIORITIES)}", field=path)


def read_token_ids(
    path: str, value: object, max_ids: int, *, allow_empty: bool = False
) -> tuple[int, ...]:
    """An array of token ids. Ids beyond the model's vocabulary are found later, by who knows the
    model.
    """
    if type(value) is not list and type(value) is not tuple:
        raise wrong_type(path, "an array of token ids", value)
    if len(value) > max_ids:
        raise TooLarge(f"{path}: {len(value)} ids, the limit is {max_ids}", field=path)
    if not value and not allow_empty:
        raise InvalidField(f"{path}: is empty", field=path)
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            read_int(f"{path}[{index}]", item, 0, MAX_TOKEN_ID)
    return tuple(value)


def read_ids_blob(
    path: str, index: object, blobs: tuple[bytes, ...], max_ids: int
) -> tuple[int, ...]:
    """Token ids from a blob of little-endian int32 that the body names by index."""
    number = read_int(path, index, 0, MAX_TOKEN_ID)
    if number >= len(blobs):
        raise InvalidField(f"{path}: blob {number} of {len(blobs)} does not exist", field=path)
    blob = blobs[number]
    if not blob or len(blob) % 4:
        raise InvalidField(f"{path}: {len(blob)} bytes are not a row of int32", field=path)
    if len(blob) > 4 * max_ids:
        raise TooLarge(f"{path}: {len(blob) // 4} ids, the limit is {max_ids}", field=path)
    ids = unpack_ids(blob)
    if min(ids) < 0:
        raise InvalidField(f"{path}: holds a negative token id", field=path)
    return tuple(ids)


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32."""
    if len(ids) == 1:  # one token a step is the rule
        return ids[0].to_bytes(4, "little", signed=True)
    row = array("i", ids)
    if sys.byteorder == "big":
        row.byteswap()
    return row.tobytes()


def unpack_ids(blob: bytes) -> array[int]:
    """Inverse of `pack_ids`; len(blob) is a multiple of 4."""
    row = array("i")
    row.frombytes(blob)
    if sys.byteorder == "big":
        row.byteswap()
    return row


def read_stop(path: str, value: object) -> tuple[str, ...]:
    """Stop strings: one string, or an array of at most 16, each of 1..256 characters."""
    if type(value) is str:
        value = [value]
    if type(value) is not list and type(value) is not tuple:
        raise wrong_type(path, "an array of strings", value)
    if len(value) > MAX_STOP_STRINGS:
        message = f"{path}: {len(value)} strings, the limit is {MAX_STOP_STRINGS}"
        raise InvalidField(message, field=path)
    for index, item in enumerate(value):
        text = read_str(f"{path}[{index}]", item)
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            where = f"{path}[{index}]"
            message = f"{where}: {len(text)} characters, expected 1..{MAX_STOP_CHARS}"
            raise InvalidField(message, field=where)
    return tuple(value)


def read_messages(path: str, value: object) -> tuple[Mapping[str, Any], ...]:
    """Chat messages, each normalised to role, content (one string) and, where given, name."""
    if type(value) is not list and type(value) is not tuple:
        raise wrong_type(path, "an array of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        message = f"{path}: {len(value)} messages, expected 1..{MAX_MESSAGES}"
        raise InvalidField(message, field=path)
    messages = tuple(_read_message(f"{path}[{i}]", item) for i, item in enumerate(value))
    size = sum(len(m["content"].encode()) for m in messages)
    if size > MAX_TEXT_BYTES:
        message = f"{path}: {size} bytes of content, the limit is {MAX_TEXT_BYTES}"
        raise TooLarge(message, field=path)
    return messages


def _read_message(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(path, "a map with role and content", value)
    for key in ("role", "content"):
        if value.get(key) is None:
            raise InvalidField(f"{path}.{key}: is missing", field=f"{path}.{key}")
    role = read_str(f"{path}.role", value["role"])
    if role not in ROLES:
        message = f"{path}.role: {role[:40]!r} is not one of {', '.join(ROLES)}"
        raise InvalidField(message, field=f"{path}.role")
    for key in ("tool_calls", "tool_call_id", "function_call"):
        if value.get(key) not in (None, [], ""):
            raise Unsupported(f"{path}.{key}: tool calls are not supported", field=f"{path}.{key}")
    result = {"role": role, "content": _read_content(f"{path}.content", value["content"])}
    if value.get("name") is not None:
        result["name"] = read_str(f"{path}.name", value["name"], max_bytes=256)
    return result


def _read_content(path: str, value: object) -> str:
    if type(value) is str:
        return read_str(path, value)
    if type(value) is not list and type(value) is not tuple:
        raise wrong_type(path, "a string or an array of parts", value)
    if not value:
        raise InvalidField(f"{path}: is empty", field=path)
    return "".join(_read_part(f"{path}[{i}]", part) for i, part in enumerate(value))


def _read_part(path: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise wrong_type(path, "a map with type and text", part)
    kind = read_str(f"{path}.type", part.get("type"))
    if kind != "text":
        message = f"{path}.type: content of type {kind[:40]!r} is not supported, only text"
        raise Unsupported(message, field=f"{path}.type")
    return read_str(f"{path}.text", part.get("text"))
