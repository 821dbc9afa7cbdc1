"""Bodies of the ZeroMQ messages as values, but for SUBMIT's (`parse.py`).

Each class has `to_body` for the sender and `from_body` for the receiver. What a client sends is
checked like any untrusted input (InvalidField naming the field); what a worker sends must fit or is
BadFrame. Unknown keys are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenbus import fields as f
from tokenbus.errors import BadFrame, TokenbusError, from_wire
from tokenbus.events import Done, Failed, Tokens, read_reason, usage_from_map, usage_to_map
from tokenbus.protocol import MAJOR, MAX_INT, Limits

MAX_MESSAGE_BYTES = 512  # of an error's text on the wire
_CLIENT = re.compile(r"[A-Za-z0-9._:-]{16,64}\Z")
_WORD = re.compile(r"[ -~]{0,64}\Z")

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hello:
    """c -> w, first on every connection. `client` is stable across reconnects; the newest HELLO
    owns its streams.

    credit: TOKENS events granted from the start. agent: name and version of the client library, for
    logs.
    """

    client: str
    credit: int
    versions: tuple[int, ...] = (MAJOR,)
    tenant: str = ""
    agent: str = ""

    def to_body(self) -> dict[str, Any]:
        """Map for the wire."""
        return {
            "client": self.client,
            "credit": self.credit,
            "versions": list(self.versions),
            "tenant": self.tenant,
            "agent": self.agent,
        }

    @classmethod
    def from_body(cls, body: Body) -> Hello:
        """Check a body. Raises InvalidField."""
        rule = "16-64 characters of [A-Za-z0-9._:-]"
        return cls(
            client=f.read_matching("client", body.get("client"), _CLIENT, rule),
            credit=f.read_int("credit", body.get("credit", 0), 0, MAX_INT),
            versions=f.read_token_ids("versions", body.get("versions", [MAJOR]), 16),
            tenant=f.read_tenant("tenant", body.get("tenant", "")),
            agent=f.read_matching(
                "agent", body.get("agent", ""), _WORD, "up to 64 ASCII characters"
            ),
        )


@dataclass(frozen=True, slots=True)
class Welcome:
    """w -> c. boot: random per worker process; another one than before means that jobs and logs are
    gone.

    heartbeat_ms: how often to send PING when nothing else is sent. retain_ms: how long an ended job
    can be resumed.
    """

    worker: str
    boot: str
    queue: str
    models: tuple[str, ...]
    heartbeat_ms: int
    retain_ms: int
    version: int = MAJOR
    limits: Limits = field(default_factory=Limits)

    def to_body(self) -> dict[str, Any]:
        """Map for the wire."""
        limits = {name: getattr(self.limits, name) for name in Limits.__slots__}
        return {
            "version": self.version,
            "worker": self.worker,
            "boot": self.boot,
            "queue": self.queue,
            "models": list(self.models),
            "heartbeat_ms": self.heartbeat_ms,
            "retain_ms": self.retain_ms,
            "limits": limits,
        }

    @classmethod
    def from_body(cls, body: Body) -> Welcome:
        """Check a body. Raises BadFrame."""
        limits = body.get("limits", {})
        models = body.get("models", [])
        if not isinstance(limits, Mapping) or not isinstance(models, list):
            raise BadFrame("WELCOME: limits is not a map or models not an array")
        default = Limits()
        known = {
            name: get_int(limits, name, getattr(default, name), low=1) for name in Limits.__slots__
        }
        return cls(
            version=get_int(body, "version"),
            worker=get_str(body, "worker"),
            boot=get_str(body, "boot"),
            queue=get_str(body, "queue", ""),
            models=tuple(str(m) for m in models),
            heartbeat_ms=get_int(body, "heartbeat_ms", 2_000, low=1),
            retain_ms=get_int(body, "retain_ms", 0),
            limits=Limits(**known),
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """w -> c. seq: tokens the job already has (more than 0 after a repeated SUBMIT); they follow
    from seq 1.

    seed: the one in use; to continue elsewhere, send it back with `have`.
    """

    job: str
    attempt: int
    seed: int
    prompt_tokens: int
    seq: int = 0
    queue_position: int = 0

    def to_body(self) -> dict[str, Any]:
        """Map for the wire."""
        return {name: getattr(self, name) for name in Accepted.__slots__}

    @classmethod
    def from_body(cls, body: Body) -> Accepted:
        """Check a body. Raises BadFrame."""
        return cls(
            job=get_str(body, "job"),
            attempt=get_int(body, "attempt", 1),
            seed=get_int(body, "seed", 0),
            prompt_tokens=get_int(body, "prompt_tokens", 0),
            seq=get_int(body, "seq", 0),
            queue_position=get_int(body, "queue_position", 0),
        )


@dataclass(frozen=True, slots=True)
class Resume:
    """c -> w: send what this job has after seq `after`, then what comes."""

    job: str
    after: int

    def to_body(self) -> dict[str, Any]:
        """Map for the wire."""
        return {"job": self.job, "after": self.after}

    @classmethod
    def from_body(cls, body: Body) -> Resume:
        """Check a body. Raises InvalidField."""
        return cls(
            job=f.read_job_id("job", body.get("job")),
            after=f.read_int("after", body.get("after"), 0, MAX_INT),
        )


def read_cancel(body: Body) -> str:
    """Job id of a CANCEL. Raises InvalidField."""
    return f.read_job_id("job", body.get("job"))


def read_credit(body: Body) -> int:
    """`total` of a CREDIT: TOKENS events granted since HELLO, an absolute number. Raises
    InvalidField.
    """
    return f.read_int("total", body.get("total"), 0, MAX_INT)


def read_ping(body: Body) -> int:
    """`t` of a PING or PONG, echoed as it came; 0 if absent. Raises InvalidField."""
    return f.read_int("t", body.get("t", 0), -MAX_INT, MAX_INT)


def read_stats_question(body: Body) -> str | None:
    """Job that a client's STATS asks about; None: about the worker. Raises InvalidField."""
    job = body.get("job")
    return None if job is None else f.read_job_id("job", job)


def tokens_to_body(events: Sequence[Tokens]) -> dict[str, Any]:
    """Body of one TOKENS message: all events of one step for one client."""
    return {"events": [[e.job, e.attempt, e.seq, list(e.ids), e.text] for e in events]}


def tokens_from_body(body: Body) -> list[Tokens]:
    """Events of a TOKENS message. Further elements of an event are ignored. Raises BadFrame."""
    rows = body.get("events")
    if type(rows) is not list:
        raise BadFrame("TOKENS: events is not an array")
    return [_read_tokens(row) for row in rows]


def _read_tokens(row: Any) -> Tokens:
    if type(row) is list and len(row) >= 5:
        job, attempt, seq, ids, text = row[:5]
        is_placed = type(attempt) is int and type(seq) is int and seq >= 1
        if type(job) is str and is_placed and type(ids) is list and ids and type(text) is str:
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id <= f.MAX_TOKEN_ID:
                    raise BadFrame("TOKENS: a token id is out of range")
            return Tokens(job, attempt, seq, tuple(ids), text)
    raise BadFrame("TOKENS: event is not [job, attempt, seq, ids, text]")


def done_to_body(done: Done) -> dict[str, Any]:
    """Body of a DONE."""
    return {
        "job": done.job,
        "attempt": done.attempt,
        "seq": done.seq,
        "reason": done.reason,
        "text": done.text,
        "usage": usage_to_map(done.usage),
        "crc": done.crc,
    }


def done_from_body(body: Body) -> Done:
    """The event in a DONE. Raises BadFrame."""
    return Done(
        job=get_str(body, "job"),
        attempt=get_int(body, "attempt", 1),
        seq=get_int(body, "seq"),
        reason=read_reason(body.get("reason")),
        text=get_str(body, "text", ""),
        usage=usage_from_map(body.get("usage", {})),
        crc=get_int(body, "crc"),
    )


def error_to_body(error: TokenbusError, **where: object) -> dict[str, Any]:
    """Body of an ERROR or REJECTED; `where`: job, attempt and seq, as far as there are any."""
    body: dict[str, Any] = {**where, "code": error.code, "retry": error.retry}
    body["message"] = cut_text(error.message)
    if error.field:
        body["field"] = cut_text(error.field)
    if error.retry_ms is not None:
        body["retry_ms"] = error.retry_ms
    return body


def error_from_body(body: Body) -> TokenbusError:
    """The exception in an ERROR or REJECTED. Raises BadFrame."""
    retry, retry_ms = body.get("retry"), body.get("retry_ms")
    return from_wire(
        get_str(body, "code"),
        get_str(body, "message", ""),
        field=get_str(body, "field", ""),
        retry=retry if type(retry) is bool else None,
        retry_ms=retry_ms if type(retry_ms) is int else None,
    )


def failed_from_body(body: Body) -> Failed:
    """The event in an ERROR that names a job. Raises BadFrame."""
    return Failed(
        job=get_str(body, "job"),
        attempt=get_int(body, "attempt", 1),
        seq=get_int(body, "seq", 0),
        error=error_from_body(body),
    )


def cut_text(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """At most max_bytes of UTF-8, cut between characters; lone surrogates become '?'."""
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def get_str(body: Body, key: str, default: str | None = None) -> str:
    """A string of a worker's body. Raises BadFrame."""
    value = body.get(key, default)
    if type(value) is not str:
        raise BadFrame(f"{key} is not a string")
    return value


def get_int(body: Body, key: str, default: int | None = None, *, low: int = 0) -> int:
    """An integer >= low of a worker's body. Raises BadFrame."""
    value = body.get(key, default)
    if type(value) is not int or value < low:
        raise BadFrame(f"{key} is not an integer >= {low}")
    return value
