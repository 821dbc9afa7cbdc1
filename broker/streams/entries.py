"""Entries of jobs streams and reply streams -> plain values, and back. Knows no connection."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from broker.messages import Done
from broker.streams.jobs import Chunk
from broker.streams.lane import Reply
from tokenbus import events
from tokenbus.entries import event_to_entry
from tokenbus.errors import TokenbusError
from tokenbus.fields import read_job_id
from tokenbus.protocol import unpack_map


def fingerprint_of(fields: Mapping[bytes, bytes]) -> str:
    """The same for two entries that ask for the same. The names of a job are not part of it, nor
    is its deadline: one that is sent again has less time left.
    """
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(fields):
        if name not in (b"job", b"idempotency_key", b"deadline_ms"):
            value = fields[name]
            digest.update(b"%d %d " % (len(name), len(value)) + name + value)
    return digest.hexdigest()


def job_id_of(fields: Mapping[bytes, bytes], entry: str) -> str:
    """Under which id the sender of a bad entry waits for the answer."""
    candidates: list[Any] = []
    with suppress(UnicodeDecodeError):
        candidates.append(fields[b"job"].decode() if b"job" in fields else None)
    with suppress(TokenbusError):
        candidates.append(unpack_map(fields[b"body"]).get("job") if b"body" in fields else None)
    for candidate in candidates:
        with suppress(TokenbusError):
            return read_job_id("job", candidate)
    return entry


def read_chunk(entry_id: bytes, fields: Sequence[bytes]) -> Chunk | None:
    """The tokens of an entry; None for other events and for what no worker has written."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    with suppress(KeyError, ValueError):
        if values[b"event"] == b"tokens":
            numbers = tuple(
                int(number) for number in values[b"ids"].decode().strip("[]").split(",")
            )
            attempt = int(entry_id.partition(b"-")[0])
            return Chunk(attempt, int(values[b"seq"]), numbers, values[b"text"].decode())
    return None


def is_whole(chunks: Sequence[Chunk], last_seq: int) -> bool:
    """The chunks hold the tokens 1 to last_seq, each once and in order."""
    expected = 1
    for chunk in chunks:
        if chunk.seq != expected:
            return False
        expected = chunk.last_seq + 1
    return expected == last_seq + 1


def flat(fields: Mapping[str, str]) -> tuple[str, ...]:
    """Names and values in turn."""
    return tuple(part for item in fields.items() for part in item)


def read_top(reply: Reply) -> tuple[int, int, bytes]:
    """Attempt, seq and event of the last entry; (0, 0, b"") of an empty stream."""
    if not reply:
        return 0, 0, b""
    entry_id, fields = reply[0]
    attempt, _, seq = entry_id.partition(b"-")
    event = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"event", b"")
    return int(attempt), int(seq), event


def last_seq_of(reply: Reply) -> int:
    """Seq of the last token in a reply stream, by its last entry; 0 of an empty stream."""
    _, seq, event = read_top(reply)
    if event == b"started":
        fields = reply[0][1]
        return int(dict(zip(fields[::2], fields[1::2], strict=True)).get(b"seq", 0))
    return seq - 1 if event in (b"done", b"error") else seq


def failed_fields(error: TokenbusError) -> tuple[str, ...]:
    """Fields and values of an error entry."""
    return flat(event_to_entry(events.Failed("", 0, 0, error)))


def done_fields(event: Done) -> tuple[str, ...]:
    """Fields and values of a done entry."""
    return flat(event_to_entry(event))
