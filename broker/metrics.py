"""What the broker counts about its jobs, its engine and itself.

Plain numbers, written on the event loop only; the exporter reads them from its own thread. On the
way of tokens the cost is a few numpy calls a step, whatever the number of rows, and one comparison
an event. Knows no socket and no Prometheus type.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from broker.messages import Address, Done, Failed
from broker.metrics_catalogue import BY_NAME, CATALOGUE, Kind
from broker.metrics_histogram import Histogram
from broker.ring.records import StepEvents

if TYPE_CHECKING:
    from broker.ledger.job import Job

PHASES = ("intake", "schedule", "launch", "collect", "publish")
SLOTS = 1 << 16  # more than runs can be in an engine at once, so rids in it never share a slot
RECENT_JOBS = 256
RECENT_S = 60.0

Labels = tuple[str, ...]


class Metrics:
    """One for the broker process. Names are checked against the catalogue: KeyError otherwise."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {
            metric.name: {} for metric in CATALOGUE if metric.kind is not Kind.HISTOGRAM
        }
        self._histograms: dict[str, dict[Labels, Histogram]] = {
            metric.name: {} for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM
        }
        for metric in CATALOGUE:  # a counter that is 0 is there, so that its first rise shows
            if not metric.labels and metric.kind is Kind.COUNTER:
                self._values[metric.name][()] = 0
        self._doors: dict[Address, str] = {}
        self._steps = StepMeter(
            self.histogram("inter_token_seconds"),
            self.histogram("step_seconds"),
            self.histogram("step_rows"),
            self.histogram("step_tokens"),
        )
        self._recent_ttft: deque[tuple[float, float]] = deque(maxlen=RECENT_JOBS)
        self._num_engines = 0
        self._preemptions = 0  # of the present engine
        self._max_running = 0

    # ------------------------------------------------------------ numbers by name

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        """A gauge, or a counter that somebody else keeps."""
        self._values[name][labels] = value

    def add(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        """A counter."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + amount

    def get(self, name: str, labels: Labels = ()) -> float:
        """The value; 0 if it was never set."""
        return self._values[name].get(labels, 0)

    def clear(self, name: str) -> None:
        """Nobody knows the value any more: it is not exported until it is set again."""
        self._values[name] = {}

    def histogram(self, name: str, labels: Labels = ()) -> Histogram:
        """The histogram with these label values, made at the first call."""
        by_labels = self._histograms[name]
        found = by_labels.get(labels)
        if found is None:
            found = by_labels[labels] = Histogram(BY_NAME[name].buckets)
        return found

    def values(self, name: str) -> list[tuple[Labels, float]]:
        """Safe from another thread."""
        return list(self._values[name].items())

    def histograms(self, name: str) -> list[tuple[Labels, Histogram]]:
        """Safe from another thread."""
        return list(self._histograms[name].items())

    # ------------------------------------------------------------ jobs

    def add_door(self, door: Address, name: str) -> None:
        """What the label `door` says for jobs of this door."""
        self._doors[door] = name
        for metric in CATALOGUE:
            if metric.labels == ("door",) and metric.kind is Kind.HISTOGRAM:
                self.histogram(metric.name, (name,))

    def door_of(self, door: Address) -> str:
        """The door's name; `other` for one that was not added."""
        return self._doors.get(door, "other")

    def first_token(self, job: Job) -> None:
        """The job's first token of this attempt came."""
        door = (self.door_of(job.door),)
        ttft_s = (job.first_token_ns - job.submitted_ns) / 1e9
        self.histogram("ttft_seconds", door).observe(ttft_s)
        wait_s = (job.launched_ns - job.submitted_ns) / 1e9
        self.histogram("queue_wait_seconds", door).observe(wait_s)
        self._recent_ttft.append((job.first_token_ns / 1e9, ttft_s))

    def job_ended(self, job: Job, event: Done | Failed) -> None:
        """The job's terminal event."""
        door = self.door_of(job.door)
        outcome = event.reason if isinstance(event, Done) else event.error.code
        self.add("jobs_total", 1, (door, outcome))
        self.add("prompt_tokens_total", len(job.prepared.prompt_ids))
        usage = event.usage if isinstance(event, Done) else job.usage()
        duration_s = usage.total_ms / 1000
        self.histogram("job_seconds", (door,)).observe(duration_s)
        if outcome == "poisoned":
            self.add("poisoned_jobs_total")

    # ------------------------------------------------------------ the engine

    def take_steps(self, steps: Sequence[StepEvents]) -> None:
        """Steps of the engine, as the ledger gets them."""
        if not steps:
            return
        num_output, num_cached, num_computed, num_steps = self._steps.take(steps)
        self.add("output_tokens_total", num_output)
        self.add("computed_tokens_total", num_computed)
        self.add("steps_total", num_steps)
        if num_cached:
            self.add("prefix_hit_tokens_total", num_cached)
        last = steps[-1]
        self._take_load(last.used_blocks, last.total_blocks, last.preemptions)

    def take_stats(self, stats: Mapping[str, Any]) -> None:
        """A STATS record: means of phases over an interval, and the load on idle."""
        num_steps = int(stats.get("interval_steps", 0))
        for phase in PHASES:
            seconds = float(stats.get(f"{phase}_us", 0.0)) * max(num_steps, 1) / 1e6
            self.add("phase_seconds_total", seconds, (phase,))
        self.set("kv_blocks_cached", int(stats.get("cached_blocks", 0)))
        load = (stats.get(name, 0) for name in ("used_blocks", "total_blocks", "preemptions"))
        self._take_load(*(int(number) for number in load))

    def engine_up(self, max_num_seqs: int) -> None:
        """An engine is ready."""
        self._num_engines += 1
        if self._num_engines > 1:
            self.add("engine_restarts_total")
        self._preemptions = 0
        self._max_running = max_num_seqs
        self.set("engine_up", 1)
        self.set("max_running_jobs", max_num_seqs)

    def engine_gone(self) -> None:
        """It is not any more."""
        self.add("engine_losses_total")
        self.set("engine_up", 0)
        self.set("kv_blocks_used", 0)
        self._steps.forget()

    def _take_load(self, used_blocks: int, total_blocks: int, preemptions: int) -> None:
        self.set("kv_blocks_used", used_blocks)
        self.set("kv_blocks", total_blocks)
        if preemptions > self._preemptions:
            self.add("preemptions_total", preemptions - self._preemptions)
            self._preemptions = preemptions

    # ------------------------------------------------------------ for the bus

    def vitals(self) -> dict[str, float]:
        """A few numbers that the worker tells over the bus, for live views. at_ms: by the worker's
        own clock, so that rates come out right. Counters count from the start of the process;
        ttft_*_ms are of the last minute, at most 256 jobs, 0 without any.
        """
        gaps = self.histogram("inter_token_seconds")
        p50_ms, p95_ms = self._ttft_ms()
        by_outcome = self.values("jobs_total")
        return {
            "at_ms": time.monotonic_ns() // 1_000_000,
            "output_tokens": self.get("output_tokens_total"),
            "jobs_ended": sum(count for _, count in by_outcome),
            "max_running": self._max_running,
            "used_blocks": self.get("kv_blocks_used"),
            "total_blocks": self.get("kv_blocks"),
            "preemptions": self.get("preemptions_total"),
            "engine_restarts": self.get("engine_restarts_total"),
            "ttft_p50_ms": p50_ms,
            "ttft_p95_ms": p95_ms,
            "itl_sum_ms": round(1e3 * gaps.sum, 1),
            "itl_count": gaps.count,
        }

    def _ttft_ms(self) -> tuple[float, float]:
        recent, oldest_s = self._recent_ttft, time.monotonic() - RECENT_S
        while recent and recent[0][0] < oldest_s:
            recent.popleft()
        times = sorted(ttft_s for _, ttft_s in recent)
        if not times:
            return 0.0, 0.0
        p50, p95 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 95 // 100)]
        return round(1e3 * p50, 1), round(1e3 * p95, 1)


class StepMeter:
    """Sizes and durations of steps, and the times between the tokens of each run."""

    def __init__(
        self, gaps: Histogram, step_seconds: Histogram, rows: Histogram, tokens: Histogram
    ) -> None:
        self._gaps = gaps
        self._step_seconds = step_seconds
        self._rows = rows
        self._tokens = tokens
        # When each run's last token came, by rid modulo SLOTS; 0: none yet.
        self._last_ns: npt.NDArray[np.int64] = np.zeros(SLOTS, dtype=np.int64)

    def take(self, steps: Sequence[StepEvents]) -> tuple[int, int, int, int]:
        """Returns tokens made, prompt tokens from the prefix cache, tokens computed, steps."""
        gaps: list[npt.NDArray[np.int64]] = []
        num_output = num_cached = num_computed = num_steps = 0
        for step in steps:
            num_tokens = self._note_tokens(step, gaps) if len(step.rids) else 0
            num_output += num_tokens
            if len(step.cached_tokens):
                num_cached += int(step.cached_tokens.sum())
            if step.step_us:
                num_steps += 1
                num_computed += step.batch_tokens
                self._step_seconds.observe(step.step_us / 1e6)
                self._rows.observe(num_tokens)
                self._tokens.observe(step.batch_tokens)
        if gaps:
            all_ns = gaps[0] if len(gaps) == 1 else np.concatenate(gaps)
            self._gaps.observe_all(all_ns / 1e9)
        return num_output, num_cached, num_computed, num_steps

    def forget(self) -> None:
        """The engine is gone, and all runs with it."""
        self._last_ns.fill(0)

    def _note_tokens(self, step: StepEvents, gaps: list[npt.NDArray[np.int64]]) -> int:
        last_ns, slots = self._last_ns, step.rids.astype(np.int64) & (SLOTS - 1)
        if not step.finish.any():
            before = last_ns[slots]
            last_ns[slots] = step.time_ns
            num_tokens = len(slots)
        else:
            with_token = slots[step.token_ids >= 0]
            before = last_ns[with_token]
            last_ns[with_token] = step.time_ns
            last_ns[slots[step.finish != 0]] = 0
            num_tokens = len(with_token)
        if before.all():
            gaps.append(step.time_ns - before)
        else:
            gaps.append(step.time_ns - before[before != 0])
        return num_tokens
