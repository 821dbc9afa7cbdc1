"""What a chaos run counted: every promise by name, pauses by kind of fault, memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.chaos_audit import RedisAuditor, Seen, audit_job
from ops.bench.chaos_faults import Fault
from ops.bench.chaos_load import JobLog

_KINDS = {  # words of an auditor's line -> what it counts as
    "tokens at seq": "holes_or_repeats",
    "states last seq": "holes_or_repeats",
    "crc": "wrong_crc",
    "usage": "wrong_usage",
    "terminal events": "wrong_terminals",
    "is not the last event": "wrong_terminals",
}


@dataclass(slots=True)
class Counts:
    """Jobs by outcome and problems by kind; `lines` says each in words."""

    jobs: int = 0
    given_back: int = 0  # plain ZeroMQ jobs of a worker that left, continued by another
    refused: int = 0  # answers `busy` before a job was taken; it was asked again
    tokens: int = 0
    lost: int = 0  # no `done`
    repeated: int = 0
    holes: int = 0
    wrong_crc: int = 0
    wrong_terminals: int = 0
    wrong_usage: int = 0
    text_differs: int = 0
    other: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Nothing was lost, repeated or otherwise wrong."""
        return not self.lines

    def add_job(self, name: str, events: Sequence[Seen], ids: tuple[int, ...], text: str) -> None:
        """Audit one job's events as one reader saw them."""
        self.jobs += 1
        self.tokens += sum(len(event.ids) for event in events)
        if not events or events[-1].event != "done":
            self.lost += 1
            self.lines.append(f"{name}: lost, last {events[-1:]}")
            return
        self.add_lines(audit_job(name, events))
        if tuple(i for event in events for i in event.ids) != ids:
            self.text_differs += 1
            self.lines.append(f"{name}: its ids differ from those of an undisturbed run")
        elif "".join(event.text for event in events) != text:
            self.text_differs += 1
            self.lines.append(f"{name}: its text differs from that of an undisturbed run")

    def add_lines(self, lines: Sequence[str]) -> None:
        """Problems in an auditor's words."""
        self.lines += lines
        for line in lines:
            self._count(line)

    def _count(self, line: str) -> None:
        kind = next((kind for words, kind in _KINDS.items() if words in line), "other")
        if kind == "holes_or_repeats":
            numbers = [int(word.strip(",")) for word in line.split() if word.strip(",").isdigit()]
            kind = "repeated" if numbers[-2] < numbers[-1] else "holes"
        setattr(self, kind, getattr(self, kind) + 1)

    def to_json(self) -> dict[str, int]:
        """All numbers."""
        return {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("lines",)
        }


def count_logs(logs: Sequence[JobLog]) -> Counts:
    """What the clients saw."""
    counts = Counts()
    for log in logs:
        name = f"{log.job} ({log.door})"
        counts.add_job(name, log.seen, log.question.ids, log.question.text)
        counts.given_back += log.num_given_back
        counts.refused += log.num_refused
        if log.error:
            counts.lines.append(f"{name}: {log.error}")
    return counts


def count_streams(auditor: RedisAuditor, logs: Sequence[JobLog]) -> Counts:
    """What lies in Redis for the jobs that went through it; once they have all ended."""
    counts = Counts()
    for log in logs:
        if log.door.startswith("zmq"):
            continue
        try:
            events = auditor.events_of(log.job)
        except (KeyError, ValueError) as error:
            counts.add_lines([f"{log.job}: unreadable stream: {error!r}"])
            continue
        counts.add_job(f"{log.job} (stream)", events, log.question.ids, log.question.text)
    counts.add_lines(auditor.problems(()))
    return counts


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def takeovers(faults: Sequence[Fault]) -> dict[str, dict[str, float]]:
    """By kind of fault: how many, pauses of the interrupted jobs, the longest of those that no
    second fault fell into, time to ready again.
    """
    by_kind: defaultdict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    table: dict[str, dict[str, float]] = {}
    for kind, group in sorted(by_kind.items()):
        pauses = [pause for fault in group for pause in fault.pauses_s]
        recovered = [fault.recovered_s for fault in group]
        table[kind] = {
            "faults": len(group),
            "jobs_hit": len(pauses),
            "ready_p50_s": round(quantile(recovered, 0.5), 3),
            "ready_p99_s": round(quantile(recovered, 0.99), 3),
        }
        if pauses:
            table[kind] |= {
                "pause_p50_s": round(quantile(pauses, 0.5), 3),
                "pause_p99_s": round(quantile(pauses, 0.99), 3),
                "pause_max_s": round(max(pauses), 3),
            }
        undisturbed = [pause for fault in group for pause in fault.undisturbed_s]
        if undisturbed:
            table[kind]["undisturbed_max_s"] = round(max(undisturbed), 3)
    return table


def drift(samples: Sequence[tuple[float, dict[str, int]]]) -> dict[str, Any]:
    """Median resident memory by part in the first and the last quarter, and the change."""
    table: dict[str, Any] = {}
    quarter = max(len(samples) // 4, 1)
    for part in sorted({part for _, sizes in samples for part in sizes}):
        first = [sizes[part] for _, sizes in samples[:quarter] if part in sizes]
        last = [sizes[part] for _, sizes in samples[-quarter:] if part in sizes]
        if first and last:
            a, b = statistics.median(first), statistics.median(last)
            table[part] = {
                "first_mib": round(a / 2**20, 1),
                "last_mib": round(b / 2**20, 1),
                "drift_percent": round(100 * (b - a) / a, 2),
            }
    return table
