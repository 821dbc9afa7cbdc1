"""The engine's one loop: intake -> schedule -> launch -> collect -> publish, in one thread.

With an asynchronous runner the loop stays one step ahead: step N+1 is launched before N is
collected. It knows records and the scheduler; where records come from and go to is behind two
protocols, so a test or a benchmark drives it without a process or a ring. It blocks in two places
only: for a request when there is nothing to do, and for room when the event ring is full. A full
ring stops the loop before the next step is planned; nothing is dropped.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Protocol

import numpy as np

from broker.ring import records
from broker.ring.records import Kind, StepEvents
from engine.idle_work import IdleWork
from engine.outcome import Outcome, no_outcome
from engine.plan import Runner, StepPlan
from engine.scheduler import Scheduler
from engine.stats import StepStats

STATS_INTERVAL_S = 1.0
INTEGRITY_INTERVAL_S = 30.0
FINAL_WAIT_S = 0.2  # for room in a full ring, when the loop ends
MAX_RECORDS_PER_STEP = 256
GC_ALLOCATIONS = (
    200_000  # container objects gained without an idle moment before a collection is forced
)

_SUBMIT, _STEP = int(Kind.SUBMIT), int(Kind.STEP)


class RequestSource(Protocol):
    """Where the loop's records come from."""

    def read(self, max_records: int) -> list[tuple[int, bytes]]:
        """Records (kind, payload) that are there now. Raises LinkLost when none is left and none
        can come.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until records may be there (True), or time is up or the loop was told to stop
        (False).
        """
        ...


class EventSink(Protocol):
    """Where the loop's records go."""

    def try_write(self, kind: int, payload: bytes) -> bool:
        """Write one record; False, at once, if there is no room."""
        ...

    def wait_room(self, payload_bytes: int, timeout_s: float) -> None:
        """Block until such a record fits, time is up or the loop was told to stop. Raises
        LinkLost.
        """
        ...


class LoopEnd(Enum):
    """Why `run` returned."""

    SHUTDOWN = "shutdown"  # the broker said so
    STOPPED = "stopped"  # `stop` was called


class EngineLoop:
    """Drives one runner through one scheduler for one link at a time."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = StepStats()
        self._is_async = runner.is_async
        self._idle_work = IdleWork(runner)
        self._on_rids: dict[int, Callable[[int], None]] = {
            Kind.ABORT: scheduler.abort,
            Kind.PAUSE: scheduler.pause,
            Kind.RESUME: scheduler.resume,
        }
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._launched_ns: deque[int] = deque()
        self._is_stopping = False
        self._is_shut_down = False
        self._last_step_id = 0
        self._step_us = 0  # of the step collected last
        self._stats_due_s = 0.0
        self._integrity_due_s = 0.0
        self._was_busy = False

    def stop(self) -> None:
        """Make `run` return after the step at hand; may be called from a signal handler."""
        self._is_stopping = True

    def run(self, source: RequestSource, sink: EventSink) -> LoopEnd:
        """Announce READY and serve until shutdown or `stop`; the steps in flight are still
        published.

        Raises: LinkLost: the broker is gone; call `drop_runs` before the next `run`.
        """
        ready = asdict(self.runner.info) | {"pid": os.getpid()}
        self._outbox.append((Kind.READY, records.encode_json(ready)))
        while not (self._is_stopping or self._is_shut_down):
            if not self.step(source, sink):
                self._idle(source)
            self._report(sink)
        while self.scheduler.num_in_flight:
            self._publish(self._collect(), sink)
        if not self._flush(sink):
            sink.wait_room(len(self._outbox[0][1]), FINAL_WAIT_S)
            self._flush(sink)
        return LoopEnd.SHUTDOWN if self._is_shut_down else LoopEnd.STOPPED

    def step(self, source: RequestSource, sink: EventSink) -> bool:
        """One pass. Returns False if there was nothing to do but wait for a request."""
        if self._outbox and not self._flush(sink):
            sink.wait_room(len(self._outbox[0][1]), STATS_INTERVAL_S)
            return True
        clock = time.monotonic_ns
        start = clock()
        self._intake(source)
        taken_in = clock()
        plan = self.scheduler.plan()
        scheduled = clock()
        if plan is not None:
            self._launch(plan)
        launched = clock()
        outcome = None
        if self.scheduler.num_in_flight > (1 if plan is not None and self._is_async else 0):
            outcome = self._collect()
        collected = clock()
        has_published = self._publish(outcome, sink)
        if plan is None and outcome is None:
            return has_published or self._is_shut_down
        self.stats.add_times(start, taken_in, scheduled, launched, collected, clock())
        self._was_busy = True
        return True

    def drop_runs(self) -> None:
        """The broker is gone: forget its runs and what it has not read, keep model and prefix
        cache.

        Raises: IntegrityError: the books do not add up afterwards.
        """
        while self.scheduler.num_in_flight:
            self._collect()
        self._outbox.clear()
        self.scheduler.reset()
        self.scheduler.check_integrity()

    # --- phases ---

    def _intake(self, source: RequestSource) -> None:
        """Apply the records that came since the last pass, in order."""
        scheduler = self.scheduler
        for kind, payload in source.read(MAX_RECORDS_PER_STEP):
            if kind == _SUBMIT:
                reject = scheduler.submit(records.decode_submit(payload))
                if reject is not None:
                    self._outbox.append((Kind.REJECT, records.encode_reject(reject)))
            elif kind == Kind.SHUTDOWN:
                self._is_shut_down = True
            else:
                apply = self._on_rids.get(kind)
                if apply is None:
                    raise records.RecordError(f"record kind {kind} came from the broker")
                for rid in records.decode_rids(payload):
                    apply(rid)

    def _launch(self, plan: StepPlan) -> None:
        """Start the step; what it computes may be shared from now on."""
        self._launched_ns.append(time.monotonic_ns())
        self.runner.launch(plan)
        self.scheduler.launched()

    def _collect(self) -> Outcome:
        """Wait for the oldest step in flight and take in its tokens."""
        result = self.runner.collect()
        self._step_us = (time.monotonic_ns() - self._launched_ns.popleft()) // 1000
        outcome = self.scheduler.complete(result)
        self.stats.add_outcome(outcome)
        return outcome

    def _publish(self, outcome: Outcome | None, sink: EventSink) -> bool:
        """Write one record for the step and for runs that ended outside it. Returns whether
        there was one.
        """
        ends = self.scheduler.take_ends()
        if outcome is not None or ends:
            events = self._make_events(outcome, ends)
            self._outbox.append((_STEP, records.encode_step(events)))
        elif not self._outbox:
            return False
        self._flush(sink)
        return True

    def _make_events(
        self, outcome: Outcome | None, ends: list[tuple[int, records.Finish]]
    ) -> StepEvents:
        """The record's arrays: ends outside the step first, so no token of those runs can follow
        them.
        """
        scheduler = self.scheduler
        now_ns = time.monotonic_ns()
        step_us = self._step_us if outcome is not None else 0
        if outcome is None:
            outcome = no_outcome(self._last_step_id)
        self._last_step_id = outcome.step_id
        rids, token_ids, finish = outcome.rids, outcome.token_ids, outcome.finish
        if ends:
            num_ends = len(ends)
            rids = np.concatenate([np.array([rid for rid, _ in ends], np.uint64), rids])
            token_ids = np.concatenate([np.full(num_ends, -1, np.int32), token_ids])
            finish = np.concatenate([np.array([why for _, why in ends], np.uint8), finish])
        return StepEvents(
            step_id=outcome.step_id,
            time_ns=now_ns,
            rids=rids,
            token_ids=token_ids,
            finish=finish,
            started_rids=outcome.started_rids,
            cached_tokens=outcome.cached_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            used_blocks=scheduler.blocks.num_used,
            total_blocks=scheduler.blocks.num_blocks,
            preemptions=scheduler.preemptions,
            batch_tokens=outcome.num_tokens,
            step_us=step_us,
        )

    # --- besides ---

    def _flush(self, sink: EventSink) -> bool:
        """Write what is pending, in order; False if the sink is full."""
        while self._outbox:
            if not sink.try_write(*self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    def _idle(self, source: RequestSource) -> None:
        """Block for a request; use a quiet moment for housekeeping."""
        if self._idle_work.do_piece():
            return
        timeout_s = max(0.0, self._stats_due_s - time.monotonic())
        if not source.wait(timeout_s) and self._was_busy:
            self._was_busy = False
            self._collect_garbage()
            if time.monotonic() >= self._integrity_due_s:
                self._integrity_due_s = time.monotonic() + INTEGRITY_INTERVAL_S
                self.scheduler.check_integrity()

    def _report(self, sink: EventSink) -> None:
        """Write STATS once a second; skipped when events wait for room."""
        now_s = time.monotonic()
        if now_s < self._stats_due_s:
            return
        self._stats_due_s = now_s + STATS_INTERVAL_S
        if gc.get_count()[0] > GC_ALLOCATIONS:
            self._collect_garbage()
        if not self._outbox:
            sink.try_write(Kind.STATS, records.encode_json(self.stats.report(self.scheduler)))

    def _collect_garbage(self) -> None:
        start = time.perf_counter()
        gc.collect()
        self.stats.gc_ms += (time.perf_counter() - start) * 1e3


def freeze_heap() -> None:
    """After loading: take what lives for ever out of the collector, and collect only when the
    loop says so.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
