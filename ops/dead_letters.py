"""The dead stream: jobs that were given up, with their requests; read them, send them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]

from ops.exit_codes import CommandError, ExitCode
from tokenbus.keys import Keys
from tokenbus.protocol import unpack_map

if TYPE_CHECKING:
    from redis import Redis

_REQUEST = "request."  # what the fields of the job's entry are called in the dead stream
_MAX_JOB_CHARS = 128


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry of the dead stream. request: the fields of the job's entry as it was sent."""

    entry: str
    job: str
    reason: str
    code: str
    attempts: int
    worker: str
    stream: str
    request: dict[bytes, bytes]

    def facts(self) -> dict[str, Any]:
        """Everything but the request."""
        names = ("entry", "job", "reason", "code", "attempts", "worker", "stream")
        return {name: getattr(self, name) for name in names}

    def readable_request(self) -> dict[str, str]:
        """The request for the eye; a msgpack body is given by its size."""
        shown = {}
        for name, value in self.request.items():
            is_binary = name == b"body"
            text = (
                f"({len(value)} bytes of msgpack)" if is_binary else value.decode(errors="replace")
            )
            shown[name.decode(errors="replace")] = text
        return shown


def _read(entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode(errors="replace")

    prefix = _REQUEST.encode()
    return DeadLetter(
        entry=entry.decode(),
        job=text("job"),
        reason=text("reason"),
        code=text("code"),
        attempts=int(text("attempts") or 0),
        worker=text("worker"),
        stream=text("stream"),
        request={k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)},
    )


def newest(redis: Redis, queue: str, limit: int) -> list[DeadLetter]:
    """The newest entries first."""
    entries: Any = redis.xrevrange(Keys(queue).dead, count=limit)
    return [_read(entry, fields) for entry, fields in entries]


def find(redis: Redis, queue: str, wanted: str, search_limit: int = 10_000) -> DeadLetter:
    """By entry id or job id, the newest that fits. Raises CommandError (NOT_FOUND)."""
    for letter in newest(redis, queue, search_limit):
        if wanted in (letter.entry, letter.job):
            return letter
    raise CommandError(
        ExitCode.NOT_FOUND,
        f"no dead job {wanted!r} in queue {queue!r}",
        "`tokenbus dead list` shows them; the id is the entry's or the job's.",
    )


def requeue(redis: Redis, queue: str, letter: DeadLetter) -> str:
    """Send the job again under a new id, and take it out of the dead stream. Returns the new id.

    A new id, because the old one has had its terminal event, and a job has only one.
    """
    if not letter.request:
        raise CommandError(
            ExitCode.FAILED,
            f"dead job {letter.job} has no request: its entry was gone when it was given up",
            "Send it again from where it came from.",
        )
    keys = Keys(queue)
    suffix = f".again-{letter.entry}"
    job = letter.job[: _MAX_JOB_CHARS - len(suffix)] + suffix
    fields: dict[Any, Any] = dict(letter.request)
    fields.pop(b"idempotency_key", None)  # it stands for the job that ended
    fields[b"job"] = job
    if b"body" in fields:
        fields[b"body"] = _renamed(fields[b"body"], job)
    stream = letter.stream if letter.stream.startswith(keys.jobs()) else keys.jobs()
    with redis.pipeline(transaction=True) as pipe:
        pipe.xadd(stream, fields)
        pipe.xdel(keys.dead, letter.entry)
        pipe.execute()
    return job


def _renamed(body: bytes, job: str) -> bytes:
    """The msgpack map of a request under another job id, without its idempotency key."""
    values = {**unpack_map(body), "job": job}
    values.pop("idempotency_key", None)
    packed: bytes = msgpack.packb(values)
    return packed
