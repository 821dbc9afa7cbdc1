"""What `tokenbus top` knows of a queue and its workers at one moment, and what changed since.

Knows no bus and no terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HISTORY = 120  # samples kept for the sparklines


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker as it told of itself. state: ready, not ready, draining or gone. vitals: see
    `broker.metrics.Metrics.vitals`, with `running` and `waiting`.
    """

    worker: str
    model: str
    state: str
    vitals: Mapping[str, float]

    def number(self, name: str) -> float:
        """One of the vitals; 0 where the worker does not tell it."""
        return self.vitals.get(name, 0)

    @property
    def running(self) -> int:
        """Jobs that have a row of the engine; a few more wait inside it for the next free one."""
        return int(min(self.number("running"), self.number("max_running")))

    @property
    def waiting(self) -> int:
        """All other jobs in the worker's hands."""
        return int(self.number("waiting") + self.number("running")) - self.running

    @property
    def kv_share(self) -> float:
        """Share of the KV cache that is in use, 0 .. 1."""
        total = self.number("total_blocks")
        return self.number("used_blocks") / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """backlog: jobs in Redis that no worker has taken, by priority; empty over ZeroMQ, where dead
    is 0 as well. source: the address, without password.
    """

    queue: str
    source: str
    workers: Sequence[WorkerSample]
    backlog: Mapping[str, int] = field(default_factory=dict)
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one worker, between its last two signs of life; 0 where nothing happened."""

    tokens_s: float = 0.0
    jobs_s: float = 0.0
    itl_ms: float = 0.0


class Trend:
    """Turns one sample after another into rates and their history."""

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}
        self.rates: dict[str, Rates] = {}
        self.tokens_s: deque[float] = deque(maxlen=HISTORY)
        self.itl_ms: deque[float] = deque(maxlen=HISTORY)
        self.ttft_ms: deque[float] = deque(maxlen=HISTORY)
        self.is_settled = False  # every worker that lives has rates

    def add(self, sample: Sample) -> None:
        """The next sample."""
        present = {worker.worker: worker for worker in sample.workers}
        self.rates = {name: rates for name, rates in self.rates.items() if name in present}
        self._last = {name: vitals for name, vitals in self._last.items() if name in present}
        for name, worker in present.items():
            before, now = self._last.get(name), worker.vitals
            if before is None or now.get("at_ms", 0) != before.get("at_ms", 0):
                if before is not None:
                    self.rates[name] = _rates(before, now)
                self._last[name] = now
            if worker.state == "gone":
                self.rates[name] = Rates()
        self.is_settled = present.keys() <= self.rates.keys()
        if self.is_settled:
            self._remember(sample)

    @property
    def total(self) -> Rates:
        """All workers together; the time between tokens is the mean over their tokens."""
        rates = list(self.rates.values())
        tokens_s = sum(r.tokens_s for r in rates)
        weighted = sum(r.itl_ms * r.tokens_s for r in rates)
        return Rates(tokens_s, sum(r.jobs_s for r in rates), weighted / tokens_s if tokens_s else 0)

    def _remember(self, sample: Sample) -> None:
        total = self.total
        self.tokens_s.append(total.tokens_s)
        self.itl_ms.append(total.itl_ms)
        self.ttft_ms.append(max((w.number("ttft_p50_ms") for w in sample.workers), default=0))

    def facts(self, sample: Sample) -> dict[str, Any]:
        """Sample and rates as one JSON object."""
        workers = [
            {
                "worker": worker.worker,
                "model": worker.model,
                "state": worker.state,
                **worker.vitals,
                "running": worker.running,
                "waiting": worker.waiting,
                **_rounded(self.rates.get(worker.worker, Rates())),
            }
            for worker in sample.workers
        ]
        return {
            "queue": sample.queue,
            "source": sample.source,
            "backlog": dict(sample.backlog),
            "dead": sample.dead,
            "running": sum(worker.running for worker in sample.workers),
            "waiting": sum(worker.waiting for worker in sample.workers),
            **_rounded(self.total),
            "workers": workers,
        }


def _rates(before: Mapping[str, float], now: Mapping[str, float]) -> Rates:
    span_s = (now.get("at_ms", 0) - before.get("at_ms", 0)) / 1000

    def grown(name: str) -> float:
        return now.get(name, 0) - before.get(name, 0)

    if span_s <= 0 or grown("output_tokens") < 0:  # the broker was started again meanwhile
        return Rates()
    num_gaps = grown("itl_count")
    return Rates(
        tokens_s=grown("output_tokens") / span_s,
        jobs_s=grown("jobs_ended") / span_s,
        itl_ms=grown("itl_sum_ms") / num_gaps if num_gaps > 0 else 0.0,
    )


def _rounded(rates: Rates) -> dict[str, float]:
    return {name: round(value, 2) for name, value in asdict(rates).items()}
