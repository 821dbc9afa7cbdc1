"""What must hold for every job after whatever happened, checked from the public contract alone.

Uses none of the worker's or the client's parsing, so that a mistake there cannot hide itself.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

TERMINAL = ("done", "error")
PRIORITIES = ("", ":high", ":low")
PERMANENT = ("jobs", "jobs:high", "jobs:low", "control", "dead", "workers")
WITH_TTL = ("out", "job", "cancel", "idem")


@dataclass(frozen=True, slots=True)
class Seen:
    """One event of one job as an outsider saw it.

    seq: of the first id for `tokens`, of the last token for a terminal event. crc only for `done`.
    """

    job: str
    event: str
    attempt: int = 1
    seq: int = 0
    ids: tuple[int, ...] = ()
    text: str = ""
    crc: int = 0
    completion_tokens: int | None = None


class AuditError(AssertionError):
    """Everything that was found wrong, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(f"{len(problems)} problems:\n" + "\n".join(problems[:50]))
        self.problems = list(problems)


def crc_of(ids: Iterable[int]) -> int:
    """CRC-32 over ids as little-endian int32."""
    ids = list(ids)
    return zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))


def audit_job(job: str, events: Sequence[Seen]) -> list[str]:
    """Problems of one job's events in the order they were seen: one terminal event, at the end;
    seqs 1..N without holes or repeats, also over attempts; attempts only grow; crc and counts
    right.
    """
    problems: list[str] = []
    ids: list[int] = []
    attempt = 0
    for at, event in enumerate(events):
        if event.attempt < attempt:
            problems.append(f"{job}: attempt {event.attempt} after attempt {attempt}")
        if event.event == "started" and event.attempt == attempt:
            problems.append(f"{job}: attempt {attempt} started twice")
        attempt = max(attempt, event.attempt)
        if event.event == "tokens":
            if event.seq != len(ids) + 1:
                problems.append(f"{job}: tokens at seq {event.seq}, expected {len(ids) + 1}")
            ids += event.ids
        elif event.event in TERMINAL:
            if at != len(events) - 1:
                problems.append(f"{job}: {event.event} is not the last event")
            problems += _audit_terminal(job, event, ids)
    num_terminal = sum(event.event in TERMINAL for event in events)
    if num_terminal != 1:
        problems.append(f"{job}: {num_terminal} terminal events, expected 1")
    return problems


def _audit_terminal(job: str, event: Seen, ids: Sequence[int]) -> list[str]:
    problems = []
    if event.seq != len(ids):
        problems.append(f"{job}: {event.event} states last seq {event.seq}, saw {len(ids)} tokens")
    if event.event == "done":
        if event.crc != crc_of(ids):
            problems.append(f"{job}: crc {event.crc}, the ids give {crc_of(ids)}")
        if event.completion_tokens not in (None, len(ids)):
            problems.append(f"{job}: usage states {event.completion_tokens} tokens, saw {len(ids)}")
    return problems


class EventAuditor:
    """The event log of a ZeroMQ client, as the client handed it to its user or as it came in."""

    def __init__(self) -> None:
        self._events: defaultdict[str, list[Seen]] = defaultdict(list)

    def see(self, event: Seen) -> None:
        """Note one event."""
        self._events[event.job].append(event)

    def see_tokenbus(self, event: Any) -> None:
        """Note an event of the Python client (`tokenbus.events`)."""
        name = type(event).__name__
        names = {"Started": "started", "Tokens": "tokens", "Done": "done", "Failed": "error"}
        usage = getattr(event, "usage", None)
        self.see(
            Seen(
                job=event.job,
                event=names[name],
                attempt=event.attempt,
                seq=getattr(event, "seq", 0),
                ids=tuple(getattr(event, "ids", ())),
                text=getattr(event, "text", ""),
                crc=getattr(event, "crc", 0),
                completion_tokens=usage.completion_tokens if usage is not None else None,
            )
        )

    def text_of(self, job: str) -> str:
        """The job's whole text."""
        return "".join(event.text for event in self._events[job])

    def ids_of(self, job: str) -> list[int]:
        """The job's tokens."""
        return [token for event in self._events[job] for token in event.ids]

    def problems(self, jobs: Iterable[str]) -> list[str]:
        """Everything wrong with these jobs, and events of jobs nobody asked for."""
        jobs = list(jobs)
        found = [line for job in jobs for line in audit_job(job, self._events[job])]
        strangers = sorted(set(self._events) - set(jobs))
        return found + [f"{job}: events of a job that was never submitted" for job in strangers]

    def check(self, jobs: Iterable[str]) -> None:
        """Raises AuditError unless all is well."""
        if problems := self.problems(jobs):
            raise AuditError(problems)


class RedisAuditor:
    """One queue in Redis, when every job has ended."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        """client: with decode_responses=True."""
        self._redis: Any = client
        self._prefix = f"tokenbus:{{{queue}}}:"

    def events_of(self, job: str) -> list[Seen]:
        """The job's out stream. Raises KeyError or ValueError for an entry outside the contract."""
        return [
            _seen_of_entry(job, entry, fields)
            for entry, fields in self._redis.xrange(f"{self._prefix}out:{job}")
        ]

    def text_of(self, job: str) -> str:
        """The job's whole text."""
        return "".join(event.text for event in self.events_of(job))

    def ids_of(self, job: str) -> list[int]:
        """The job's tokens."""
        return [token for event in self.events_of(job) for token in event.ids]

    def problems(self, jobs: Iterable[str]) -> list[str]:
        """Everything wrong with these jobs and with the queue as a whole."""
        found = [line for job in jobs for line in self._problems_of_job(job)]
        return found + self._problems_of_streams() + self._problems_of_keys()

    def check(self, jobs: Iterable[str]) -> None:
        """Raises AuditError unless all is well."""
        if problems := self.problems(jobs):
            raise AuditError(problems)

    def _problems_of_job(self, job: str) -> list[str]:
        try:
            events = self.events_of(job)
        except (KeyError, ValueError) as error:
            return [f"{job}: unreadable out stream: {error!r}"]
        problems = audit_job(job, events)
        started = {event.attempt for event in events if event.event == "started"}
        unfenced = {event.attempt for event in events if event.event == "tokens"} - started
        problems += [f"{job}: attempt {n} has tokens but no started entry" for n in unfenced]
        state = self._redis.hget(f"{self._prefix}job:{job}", "state")
        expected = {"done": "done", "error": "failed"}.get(events[-1].event if events else "")
        if state != expected:
            problems.append(f"{job}: state {state!r} in its hash, expected {expected!r}")
        return problems

    def _problems_of_streams(self) -> list[str]:
        problems = []
        for suffix in PRIORITIES:
            stream = f"{self._prefix}jobs{suffix}"
            if length := self._redis.xlen(stream):
                problems.append(f"{stream}: {length} entries left, expected 0")
            groups = self._redis.xinfo_groups(stream) if self._redis.exists(stream) else []
            problems += [
                f"{stream}: group {group['name']} holds {group['pending']} entries unacknowledged"
                for group in groups
                if group["pending"]
            ]
        return problems

    def _problems_of_keys(self) -> list[str]:
        problems = []
        for key in sorted(self._redis.scan_iter(f"{self._prefix}*", count=1000)):
            name = key.removeprefix(self._prefix)
            if name in PERMANENT:
                continue
            if name.partition(":")[0] not in WITH_TTL:
                problems.append(f"{key}: no key of the documented layout")
            elif self._redis.pttl(key) == -1:
                problems.append(f"{key}: has no TTL")
        return problems


def _seen_of_entry(job: str, entry: str, fields: Mapping[str, str]) -> Seen:
    """One out entry, its id against its fields."""
    attempt, seq = map(int, entry.split("-"))
    event = fields["event"]
    if event == "started":
        if seq != 0 or int(fields["attempt"]) != attempt:
            raise ValueError(f"started entry {entry} states attempt {fields['attempt']}")
        return Seen(job, event, attempt)
    if event == "tokens":
        ids = tuple(json.loads(fields["ids"]))
        first = int(fields["seq"])
        if first + len(ids) - 1 != seq:
            raise ValueError(f"tokens entry {entry} holds seqs {first}..{first + len(ids) - 1}")
        return Seen(job, event, attempt, first, ids, fields["text"])
    if event not in TERMINAL:
        raise ValueError(f"entry {entry} has event {event!r}")
    if event == "error":
        return Seen(job, event, attempt, seq - 1)
    usage = json.loads(fields["usage"])
    return Seen(
        job,
        event,
        attempt,
        seq - 1,
        text=fields.get("text", ""),
        crc=int(fields["crc"]),
        completion_tokens=usage["completion_tokens"],
    )
