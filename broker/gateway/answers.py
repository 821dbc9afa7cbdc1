"""Bodies of answers about one job."""

from __future__ import annotations

from broker.gateway.stream import Stream
from broker.messages import Failed, Found
from tokenbus.errors import UnknownJob

_SHOWN = ("state", "worker", "reason", "code")


def unknown(job: str) -> UnknownJob:
    """Nobody has the job, or nobody whom the client may know of."""
    return UnknownJob(f"job: nobody knows {job!r} here", field="job")


def accepted_body(stream: Stream, position: int) -> dict[str, object]:
    """ACCEPTED."""
    return {
        "job": stream.job,
        "attempt": stream.attempt,
        "seed": stream.seed,
        "prompt_tokens": stream.prompt_tokens,
        "seq": stream.last_seq,
        "queue_position": position,
    }


def job_stats(stream: Stream) -> dict[str, object]:
    """STATS of a job of this door."""
    body: dict[str, object] = {
        "job": stream.job,
        "state": "running" if stream.last_seq else "queued",
        "attempt": stream.attempt,
        "seq": stream.last_seq,
        "prompt_tokens": stream.prompt_tokens,
    }
    event = stream.terminal
    if isinstance(event, Failed):
        body.update(state="failed", code=event.error.code)
    elif event is not None:
        body.update(state="done", reason=event.reason)
    return body


def found_stats(found: Found) -> dict[str, object]:
    """STATS of a job in Redis."""
    fields = found.fields or {}
    body: dict[str, object] = {"job": found.job, "state": "queued", "seq": found.seq}
    body.update({name: fields[name] for name in _SHOWN if name in fields})
    for name in ("attempt", "prompt_tokens"):
        if name in fields:
            body[name] = int(fields[name])
    return body
