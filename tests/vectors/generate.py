"""Writes the golden vectors beside this file: `python tests/vectors/generate.py` (with
clients/python on PYTHONPATH).

The vectors fix the wire for every client in every language. A change in them is a change of the
protocol: a frame of one minor version must stay readable by all others of the same major version.
`test_tokenbus_vectors.py` fails when the files and this script disagree.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack

from tokenbus.bodies import (
    Accepted,
    Hello,
    Resume,
    Welcome,
    done_to_body,
    error_to_body,
    tokens_to_body,
)
from tokenbus.entries import entry_id, event_to_entry
from tokenbus.errors import Busy, EngineLost, InvalidField
from tokenbus.events import Done, Failed, Started, Tokens, Usage, crc32_of_ids
from tokenbus.parse import build_entry, build_submit
from tokenbus.protocol import MessageType, encode, head
from tokenbus.request import JobRequest, SamplingParams

HERE = Path(__file__).parent
JOB = "job-1"
USAGE = Usage(5, 3, 4, 0.5, 12.25, 40.0)
IDS = (504, 3575, 282)
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 你好 🙂"})

EVENTS = (
    Started(JOB, 1, "host-7-a1b2", 2**53 - 1, 5),
    Tokens(JOB, 1, 1, IDS[:2], " the 🙂"),
    Tokens(JOB, 2, 3, IDS[2:], ""),
    Done(JOB, 2, 3, "stop", "held", USAGE, crc32_of_ids(IDS)),
    Done(JOB, 1, 0, "cancelled", "", USAGE, 0),
    Failed(JOB, 1, 2, EngineLost("the engine died", retry_ms=1_000)),
    Failed(JOB, 1, 0, InvalidField("top_p: 7 is not in (0.0, 1.0]", field="top_p")),
)

REQUESTS = {
    "prompt": JobRequest(job=JOB, prompt="Hello", params=SamplingParams(max_tokens=16)),
    "chat": JobRequest(
        job=JOB,
        messages=CHAT,
        params=SamplingParams(
            max_tokens=64,
            temperature=0.8,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            seed=7,
            stop=("\n\n", "END"),
            stop_token_ids=(2,),
            ignore_eos=True,
        ),
        priority="high",
        deadline_ms=30_000,
        tenant="acme",
        idempotency_key="order-17",
        model="smollm2-135m",
    ),
    "ids_inline": JobRequest(job=JOB, input_ids=(1, 2, 3)),
    "ids_blob": JobRequest(job=JOB, input_ids=tuple(range(1_000, 1_100))),
    "continue": JobRequest(job=JOB, prompt="Hello", params=SamplingParams(seed=7), have=IDS),
}


def messages() -> list[tuple[str, str, MessageType, dict[str, Any], list[bytes]]]:
    """Every message type at least once: name, direction, type, body, blobs."""
    t = MessageType
    done, failed = EVENTS[3], EVENTS[5]
    assert isinstance(done, Done)
    assert isinstance(failed, Failed)
    hello = Hello("client-0123456789abcdef", 256, tenant="acme", agent="tokenbus-python/0.1.0")
    welcome = Welcome("host-7-a1b2", "b00t", "default", ("smollm2-135m",), 2_000, 300_000)
    tokens = tokens_to_body([e for e in EVENTS if isinstance(e, Tokens)])
    error = error_to_body(failed.error, job=JOB, attempt=1, seq=2)
    busy = error_to_body(Busy("the queue is full", retry_ms=250), job=JOB)
    plain = [
        ("hello", "c->w", t.HELLO, hello.to_body()),
        ("hello-least", "c->w", t.HELLO, {"client": "client-0123456789abcdef"}),
        ("welcome", "w->c", t.WELCOME, welcome.to_body()),
        ("accepted", "w->c", t.ACCEPTED, Accepted(JOB, 1, 7, 5).to_body()),
        ("rejected", "w->c", t.REJECTED, busy),
        ("tokens", "w->c", t.TOKENS, tokens),
        ("done", "w->c", t.DONE, done_to_body(done)),
        ("error-of-a-job", "w->c", t.ERROR, error),
        ("error-of-a-frame", "w->c", t.ERROR, {"code": "bad_frame", "retry": False, "message": ""}),
        ("cancel", "c->w", t.CANCEL, {"job": JOB}),
        ("resume", "c->w", t.RESUME, Resume(JOB, 2).to_body()),
        ("credit", "c->w", t.CREDIT, {"total": 4_096}),
        ("ping", "both", t.PING, {"t": 1}),
        ("pong", "both", t.PONG, {"t": 1}),
        ("stats-of-worker-asked", "c->w", t.STATS, {}),
        ("stats-of-worker", "w->c", t.STATS, {"running": 3, "waiting": 0, "ready": True}),
        ("stats-of-job-asked", "c->w", t.STATS, {"job": JOB}),
        ("stats-of-job", "w->c", t.STATS, {"job": JOB, "state": "running", "attempt": 1, "seq": 2}),
        ("drain", "w->c", t.DRAIN, {"drain_ms": 30_000}),
        ("unknown-keys-are-ignored", "both", t.PING, {"t": 1, "later": {"a": [None, 1.5, b"\0"]}}),
        ("integers-up-to-2^53-1", "both", t.PING, {"t": 2**53 - 1, "low": -(2**53) + 1}),
        ("depth-6", "both", t.PING, {"a": [[[[[1]]]]]}),
    ]
    submits = [(f"submit-{n}", "c->w", t.SUBMIT, *build_submit(r)) for n, r in REQUESTS.items()]
    return [(*row, []) for row in plain] + submits


PING = head(MessageType.PING)
OK_BODY = b"\x81\xa1t\x01"
Row = tuple[str, str, list[bytes]]  # name, code, frames


def malformed_heads() -> list[Row]:
    """Wrong frames around a good body."""
    ping, ok = PING, OK_BODY
    return [
        ("no frames", "bad_frame", []),
        ("head only", "bad_frame", [ping]),
        ("empty head", "bad_frame", [b"", ok]),
        ("head of three bytes", "bad_frame", [ping[:3], ok]),
        ("head of five bytes", "bad_frame", [ping + b"\0", ok]),
        ("wrong magic", "bad_frame", [b"XY\x01\x0c", ok]),
        ("an HTTP request", "bad_frame", [b"GET / HTTP/1.1\r\n", b""]),
        ("major version 2", "version", [b"TB\x02\x0c", ok]),
        ("major version 0", "version", [b"TB\x00\x0c", ok]),
        ("type 0", "unsupported", [b"TB\x01\x00", ok]),
        ("type 99", "unsupported", [b"TB\x01\x63", ok]),
        ("five blobs", "too_large", [ping, ok, *([b""] * 5)]),
    ]


def malformed_bodies() -> list[Row]:
    """Bodies outside the msgpack subset."""
    ping, ok = PING, OK_BODY
    return [
        ("empty body", "bad_frame", [ping, b""]),
        ("truncated body", "bad_frame", [ping, ok[:-1]]),
        ("bytes after the body", "bad_frame", [ping, ok + b"\x00"]),
        ("reserved byte c1", "bad_frame", [ping, b"\x81\xa1t\xc1"]),
        ("an array", "bad_frame", [ping, b"\x90"]),
        ("an integer", "bad_frame", [ping, b"\x01"]),
        ("integer key", "bad_frame", [ping, b"\x81\x01\x01"]),
        ("nil key", "bad_frame", [ping, b"\x81\xc0\x01"]),
        ("bin key", "bad_frame", [ping, b"\x81\xc4\x01t\x01"]),
        ("array as key", "bad_frame", [ping, b"\x81\x91\x01\x01"]),
        ("key of 33 bytes", "bad_frame", [ping, msgpack.packb({"k" * 33: 1})]),
        ("key of 17 two-byte characters", "bad_frame", [ping, msgpack.packb({"ü" * 17: 1})]),
        ("duplicate key", "bad_frame", [ping, b"\x82\xa1t\x01\xa1t\x02"]),
        ("duplicate key inside", "bad_frame", [ping, b"\x81\xa1a\x82\xa1t\x01\xa1t\x02"]),
        ("ext", "bad_frame", [ping, b"\x81\xa1t\xd4\x05\x00"]),
        ("timestamp ext", "bad_frame", [ping, b"\x81\xa1t\xd6\xff\x00\x00\x00\x01"]),
        ("text that is not UTF-8", "bad_frame", [ping, b"\x81\xa1t\xa2\xff\xfe"]),
        ("text with a surrogate", "bad_frame", [ping, b"\x81\xa1t\xa3\xed\xa0\x80"]),
        ("NaN", "bad_frame", [ping, b"\x81\xa1t\xcb" + struct.pack(">d", float("nan"))]),
        ("infinity", "bad_frame", [ping, b"\x81\xa1t\xcb" + struct.pack(">d", float("inf"))]),
        ("NaN of 32 bits", "bad_frame", [ping, b"\x81\xa1t\xca" + struct.pack(">f", float("nan"))]),
        ("2^53", "bad_frame", [ping, b"\x81\xa1t\xcf" + struct.pack(">Q", 2**53)]),
        ("-2^53", "bad_frame", [ping, b"\x81\xa1t\xd3" + struct.pack(">q", -(2**53))]),
        ("2^64-1", "bad_frame", [ping, b"\x81\xa1t\xcf" + b"\xff" * 8]),
        ("depth 7", "bad_frame", [ping, msgpack.packb({"a": [[[[[[1]]]]]]})]),
        ("depth 500", "bad_frame", [ping, b"\x81\xa1a" + b"\x91" * 499 + b"\x01"]),
        ("depth 2000", "bad_frame", [ping, b"\x81\xa1a" + b"\x91" * 1_999 + b"\x01"]),
        ("array of 2^32-1", "bad_frame", [ping, b"\x81\xa1a\xdd\xff\xff\xff\xff"]),
        ("map of 2^32-1", "bad_frame", [ping, b"\xdf\xff\xff\xff\xff"]),
        ("string of 2^32-1", "bad_frame", [ping, b"\x81\xa1a\xdb\xff\xff\xff\xff"]),
    ]


def malformed() -> list[dict[str, Any]]:
    """Messages that must be refused, with the code of the refusal."""
    ping, ok = PING, OK_BODY
    rows = malformed_heads() + malformed_bodies()
    result = [{"name": n, "code": c, "frames": [f.hex() for f in fs]} for n, c, fs in rows]
    small = {"max_body_bytes": 8, "max_frame_bytes": 4, "max_blobs": 4}
    for name, frames in (
        ("body over the limit", [ping, msgpack.packb({"text": "too long"})]),
        ("blob over the limit", [ping, ok, b"12345"]),
    ):
        hexes = [f.hex() for f in frames]
        result.append({"name": name, "code": "too_large", "frames": hexes, "limits": small})
    return result


def entries() -> dict[str, Any]:
    """Entries of the `out` stream and of the jobs stream, as redis-cli shows them."""
    out = [{"id": entry_id(e), "fields": event_to_entry(e)} for e in EVENTS]
    jobs = [{"name": name, "fields": build_entry(request)} for name, request in REQUESTS.items()]
    return {"out": out, "jobs": jobs}


def checksums() -> list[dict[str, Any]]:
    """CRC-32 of id rows."""
    rows: list[tuple[int, ...]] = [(), (0,), (1,), IDS, (2**31 - 1,), tuple(range(1_000))]
    return [{"ids": list(ids), "crc": crc32_of_ids(ids)} for ids in rows]


def golden_frames() -> list[dict[str, Any]]:
    """Well-formed messages."""
    result = []
    for name, direction, kind, body, blobs in messages():
        frames = [frame.hex() for frame in encode(kind, body, blobs)]
        row = {"name": name, "direction": direction, "type": kind.name, "type_id": int(kind)}
        result.append({**row, "body": _jsonable(body), "frames": frames})
    return result


def _jsonable(value: Any) -> Any:
    """Bytes become {"hex": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def all_files() -> dict[str, str]:
    """File name -> content."""
    contents = {
        "frames.json": golden_frames(),
        "malformed.json": malformed(),
        "entries.json": entries(),
        "checksums.json": checksums(),
    }
    return {n: json.dumps(c, indent=1, ensure_ascii=True) + "\n" for n, c in contents.items()}


if __name__ == "__main__":
    for file_name, text in all_files().items():
        (HERE / file_name).write_text(text)
