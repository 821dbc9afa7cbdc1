"""What stands in Redis about a queue: depth, work in hand, dead jobs, workers. For the command line
and metrics of any process; reads only, with a plain redis-py client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from tokenbus.fields import PRIORITIES
from tokenbus.keys import GROUP, Keys

WORKER_GONE_MS = 5_000  # silence after which a worker counts as gone


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker as it describes itself. silent_ms: since its last sign of life, by Redis' clock.
    vitals: numbers for live views (`broker.metrics.Metrics.vitals`).
    """

    worker: str
    silent_ms: int
    capacity: int
    load: int
    is_ready: bool
    is_draining: bool
    model: str
    version: str
    host: str
    pid: int
    vitals: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """It has shown itself lately."""
        return self.silent_ms < WORKER_GONE_MS


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Counts of jobs. queued: in no worker's hands; running: in one's; both by priority."""

    queue: str
    queued: Mapping[str, int]
    running: Mapping[str, int]
    dead: int
    workers: tuple[WorkerLine, ...]


def queue_status(client: Redis, queue: str) -> QueueStatus:
    """Where a queue stands. Raises InvalidField for a bad queue name, redis-py's errors as they
    are. A queue that nobody has used has zeros.
    """
    keys = Keys(queue)
    queued: dict[str, int] = {}
    running: dict[str, int] = {}
    for priority in PRIORITIES:
        stream = keys.jobs(priority)
        held = _num_held(client, stream)
        running[priority] = held
        queued[priority] = max(0, int(client.xlen(stream)) - held)
    dead = int(client.xlen(keys.dead))
    return QueueStatus(queue, queued, running, dead, tuple(list_workers(client, queue)))


def list_workers(client: Redis, queue: str) -> list[WorkerLine]:
    """Every worker in the workers hash, by name; those that died without a word are `is_alive`
    False until another worker removes them.
    """
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    raw: Any = client.hgetall(Keys(queue).workers)
    lines = []
    for name, text in raw.items():
        with suppress(ValueError, KeyError, TypeError):  # not written by a worker of this version
            lines.append(_read_line(_text(name), json.loads(text), now_ms))
    return sorted(lines, key=lambda line: line.worker)


def _read_line(name: str, about: dict[str, Any], now_ms: int) -> WorkerLine:
    return WorkerLine(
        worker=name,
        silent_ms=max(0, now_ms - int(about["seen_ms"])),
        capacity=int(about["capacity"]),
        load=int(about["load"]),
        is_ready=bool(about["ready"]),
        is_draining=bool(about["draining"]),
        model=str(about["model"]),
        version=str(about["version"]),
        host=str(about["host"]),
        pid=int(about["pid"]),
        vitals={str(k): float(v) for k, v in about.get("vitals", {}).items()},
    )


def _num_held(client: Redis, stream: str) -> int:
    try:
        summary: Any = client.xpending(stream, GROUP)
    except ResponseError as error:
        if str(error).startswith("NOGROUP"):
            return 0
        raise
    waiting = sum(c["pending"] for c in summary["consumers"] if _text(c["name"]) == "_released")
    return int(summary["pending"]) - int(waiting)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
