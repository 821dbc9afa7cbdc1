"""Flat string fields of a Redis job entry <-> plain values.

A person types these fields into redis-cli, so numbers and booleans are read from strings, strictly.
Knows the shape of strings; ranges are `fields.py`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from tokenbus.errors import InvalidField, TooLarge
from tokenbus.protocol import unpack_map

MAX_ENTRY_BYTES = 16 << 20
MAX_JSON_DEPTH = 16

INT_FIELDS = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "deadline_ms"})
FLOAT_FIELDS = frozenset(
    {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
)
BOOL_FIELDS = frozenset({"ignore_eos", "durable"})
JSON_FIELDS = frozenset({"messages", "input_ids", "stop", "stop_token_ids", "have"})

_INT = re.compile(r"-?[0-9]{1,16}\Z")
_FLOAT = re.compile(r"-?(?:[0-9]{1,16}(?:\.[0-9]{0,32})?|\.[0-9]{1,32})(?:[eE][+-]?[0-9]{1,3})?\Z")
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def entry_to_map(
    fields: Mapping[bytes, bytes], known: Container[str], unsupported: Container[str]
) -> dict[str, Any]:
    """Values of the fields in `known` and `unsupported` by name; others are dropped.

    With a field `body` (the msgpack map of a SUBMIT) that map is the whole job; beside it only
    `job` may stand. Raises InvalidField, TooLarge, or BadFrame for a `body` that is no msgpack map
    of the subset.
    """
    size = sum(len(key) + len(value) for key, value in fields.items())
    if size > MAX_ENTRY_BYTES:
        raise TooLarge(f"entry has {size} bytes, the limit is {MAX_ENTRY_BYTES}")
    texts = {_field_name(key): value for key, value in fields.items()}
    if "body" in texts:
        return _read_body(texts)
    values: dict[str, Any] = {}
    for name, raw in texts.items():
        if name in known:
            values[name] = _read_value(name, _read_text(name, raw))
        elif name in unsupported:
            values[name] = _read_json_or_text(_read_text(name, raw))
    return values


def map_to_entry(values: Mapping[str, Any]) -> dict[str, str]:
    """Inverse of `entry_to_map` for checked values."""
    return {name: _write_value(value) for name, value in values.items()}


def read_json(path: str, text: str) -> Any:
    """A JSON value without NaN, infinities, duplicate keys or deep nesting. Raises InvalidField."""
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(text) > MAX_JSON_DEPTH:
        raise InvalidField(f"{path}: JSON is nested deeper than {MAX_JSON_DEPTH}", field=path)
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_map_from_pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{path}: not valid JSON ({error})", field=path) from None


def _read_body(texts: Mapping[str, bytes]) -> dict[str, Any]:
    extra = sorted(name for name in texts if name not in ("body", "job"))
    if extra:
        raise InvalidField(f"{extra[0]}: not allowed beside `body`", field=extra[0])
    values = unpack_map(texts["body"])
    job = _read_text("job", texts["job"]) if "job" in texts else None
    if job is not None and values.get("job", job) != job:
        raise InvalidField("job: differs from the job in `body`", field="job")
    return values if job is None else {**values, "job": job}


def _field_name(raw: bytes) -> str:
    return bytes(raw).decode("utf-8", "replace")


def _read_text(name: str, raw: bytes) -> str:
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"{name}: not valid UTF-8 ({error.reason})", field=name) from None


def _read_value(name: str, text: str) -> Any:
    if name in INT_FIELDS:
        if not _INT.match(text):
            raise InvalidField(f"{name}: {text[:40]!r} is not an integer", field=name)
        return int(text)
    if name in FLOAT_FIELDS:
        if not _FLOAT.match(text):
            raise InvalidField(f"{name}: {text[:40]!r} is not a finite number", field=name)
        return float(text)
    if name in BOOL_FIELDS:
        if text not in _BOOLS:
            raise InvalidField(f"{name}: {text[:40]!r} is not true or false", field=name)
        return _BOOLS[text]
    if name in JSON_FIELDS:
        return read_json(name, text)
    return text


def _read_json_or_text(text: str) -> Any:
    """A value that is only compared with neutral ones."""
    try:
        return read_json("", text)
    except InvalidField:
        return text


def _write_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings."""
    depth = deepest = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        mark = token.group()
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def _map_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key in an object")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")
