"""Where the host's time goes: microseconds per phase of the step loop, averaged between two
STATS records.
"""

from __future__ import annotations

from typing import Any

import structlog

from engine.outcome import Outcome
from engine.scheduler import Scheduler

PHASES = ("intake", "schedule", "launch", "collect", "publish")

log = structlog.get_logger()


class StepStats:
    """Counts since the start and since the last report."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0
        self.gc_ms = 0.0
        self._reported_steps = 0
        self._reported_preemptions = 0
        self._phase_ns = [0] * len(PHASES)
        self._longest_ns = 0

    def add_times(self, *marks_ns: int) -> None:
        """Take in one pass of the loop: clock readings before the first phase and after each."""
        phase_ns = self._phase_ns
        before = marks_ns[0]
        for i, mark in enumerate(marks_ns[1:]):
            phase_ns[i] += mark - before
            before = mark
        self._longest_ns = max(self._longest_ns, marks_ns[-1] - marks_ns[0])

    def add_outcome(self, outcome: Outcome) -> None:
        """Count one completed step."""
        self.num_steps += 1
        self.num_computed_tokens += outcome.num_tokens
        self.num_sampled_tokens += len(outcome.token_ids)

    def report(self, scheduler: Scheduler) -> dict[str, Any]:
        """Body of a STATS record; starts a new interval. Times are means per step of the
        interval in microseconds.
        """
        num_steps = self.num_steps - self._reported_steps
        if scheduler.preemptions > self._reported_preemptions:
            log.info(
                "kv.exhausted",
                preemptions=scheduler.preemptions - self._reported_preemptions,
                running=scheduler.num_running,
                total_blocks=scheduler.blocks.num_blocks,
            )
            self._reported_preemptions = scheduler.preemptions
        report: dict[str, Any] = {
            f"{phase}_us": round(total_ns / 1e3 / max(num_steps, 1), 1)
            for phase, total_ns in zip(PHASES, self._phase_ns, strict=True)
        }
        report |= {
            "interval_steps": num_steps,
            "longest_us": self._longest_ns // 1000,
            "steps": self.num_steps,
            "computed_tokens": self.num_computed_tokens,
            "sampled_tokens": self.num_sampled_tokens,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "used_blocks": scheduler.blocks.num_used,
            "cached_blocks": scheduler.blocks.num_cached,
            "total_blocks": scheduler.blocks.num_blocks,
            "preemptions": scheduler.preemptions,
            "gc_ms": round(self.gc_ms, 3),
        }
        self._reported_steps = self.num_steps
        self._phase_ns = [0] * len(PHASES)
        self._longest_ns = 0
        return report
