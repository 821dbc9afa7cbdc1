"""Entries of a job's `out` stream in Redis: fields as flat strings, to and from events.

Entry ids are `<attempt>-<seq>`: `<attempt>-0` for `started`, the seq of the last token for
`tokens`, last seq + 1 for the terminal `done` or `error`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tokenbus.bodies import cut_text
from tokenbus.errors import BadFrame, InvalidField, from_wire
from tokenbus.events import (
    Done,
    Event,
    Failed,
    Started,
    Tokens,
    Usage,
    read_reason,
    usage_from_map,
    usage_to_map,
)
from tokenbus.fields import MAX_TOKEN_ID
from tokenbus.flat import read_json

_to_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` makes one a call
_ENTRY_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})\Z")


def entry_id(event: Event) -> str:
    """The explicit id this event has in the stream."""
    if isinstance(event, Started):
        return f"{event.attempt}-0"
    if isinstance(event, Tokens):
        return f"{event.attempt}-{event.last_seq}"
    return f"{event.attempt}-{event.seq + 1}"


def parse_entry_id(text: str) -> tuple[int, int]:
    """`<attempt>-<seq>` -> numbers. Raises BadFrame."""
    match = _ENTRY_ID.match(text)
    if match is None:
        raise BadFrame(f"entry id {text[:40]!r} is not <attempt>-<seq>")
    return int(match[1]), int(match[2])


def event_to_entry(event: Event) -> dict[str, str]:
    """Fields of the entry for an event."""
    if isinstance(event, Started):
        return {
            "event": "started",
            "attempt": str(event.attempt),
            "worker": event.worker,
            "seed": str(event.seed),
            "prompt_tokens": str(event.prompt_tokens),
        }
    if isinstance(event, Tokens):
        ids = _to_json(event.ids)
        return {"event": "tokens", "text": event.text, "ids": ids, "seq": str(event.seq)}
    if isinstance(event, Done):
        usage = _to_json(usage_to_map(event.usage))
        fields = {"event": "done", "reason": event.reason, "usage": usage, "crc": str(event.crc)}
        if event.text:
            fields["text"] = event.text
        return fields
    return _failed_to_entry(event)


def _failed_to_entry(event: Failed) -> dict[str, str]:
    error = event.error
    fields = {
        "event": "error",
        "code": error.code,
        "message": cut_text(error.message),
        "retry": "true" if error.retry else "false",
    }
    if error.field:
        fields["field"] = cut_text(error.field)
    if error.retry_ms is not None:
        fields["retry_ms"] = str(error.retry_ms)
    return fields


def event_from_entry(job: str, entry: str, fields: Mapping[bytes, bytes]) -> Event | None:
    """The event in an entry; None for an event word of a later minor version. Raises BadFrame."""
    attempt, seq = parse_entry_id(entry)
    try:
        texts = {bytes(k).decode(): bytes(v).decode() for k, v in fields.items()}
        return _read_event(job, attempt, seq, texts)
    except KeyError as error:
        raise BadFrame(f"entry {entry} of {job} has no field {error}") from None
    except (ValueError, TypeError, OverflowError, InvalidField) as error:
        raise BadFrame(f"entry {entry} of {job}: {error}") from None


def _read_event(job: str, attempt: int, seq: int, texts: Mapping[str, str]) -> Event | None:
    word = texts["event"]
    if word == "started":
        seed, prompt_tokens = int(texts["seed"]), int(texts["prompt_tokens"])
        return Started(job, attempt, texts["worker"], seed, prompt_tokens)
    if word == "tokens":
        return _read_tokens(job, attempt, seq, texts)
    last = max(seq - 1, 0)
    if word == "done":
        usage = usage_from_map(read_json("usage", texts["usage"])) if "usage" in texts else Usage()
        reason = read_reason(texts["reason"])
        return Done(job, attempt, last, reason, texts.get("text", ""), usage, int(texts["crc"]))
    if word == "error":
        retry_ms = int(texts["retry_ms"]) if "retry_ms" in texts else None
        error = from_wire(
            texts["code"],
            texts.get("message", ""),
            field=texts.get("field", ""),
            retry=texts["retry"] in ("true", "1") if "retry" in texts else None,
            retry_ms=retry_ms,
        )
        return Failed(job, attempt, last, error)
    return None


def _read_tokens(job: str, attempt: int, seq: int, texts: Mapping[str, str]) -> Tokens:
    ids = read_json("ids", texts["ids"])
    if type(ids) is not list or not ids or set(map(type, ids)) != {int}:
        raise BadFrame("ids is not an array of token ids")
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise BadFrame("ids holds a number out of range")
    event = Tokens(job, attempt, int(texts["seq"]), tuple(ids), texts["text"])
    if event.last_seq != seq or event.seq < 1:
        raise BadFrame(f"entry {attempt}-{seq} holds seqs {event.seq}..{event.last_seq}")
    return event
