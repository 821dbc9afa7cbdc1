"""The ledger actor: takes jobs from the doors, runs them in the engine, ends each exactly once.

The only place where a job's state changes. It asks the queue who goes next, `Runs` how many may,
`Trials` who must run alone after a crash; the doors get one `Publish` a burst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from broker.actor import Actor, ActorSystem, Overflow
from broker.config import QueueConfig
from broker.ledger.book import Book
from broker.ledger.deadlines import DeadlineTimer
from broker.ledger.job import Job, JobState
from broker.ledger.reports import Reports
from broker.ledger.steps import take_steps
from broker.ledger.tally import Tally
from broker.link_messages import (
    EngineGone,
    EngineProgress,
    EngineStats,
    EngineUp,
    RingState,
    RunRejected,
    Steps,
)
from broker.messages import (
    Address,
    Cancel,
    Drain,
    Drop,
    Pause,
    Refused,
    Submit,
    Unpause,
)
from broker.metrics import Metrics
from broker.ring.records import Finish
from broker.text.prepare import prompt_field
from broker.text.vocabulary import Vocabulary
from tokenbus.errors import (
    Busy,
    Conflict,
    Draining,
    Internal,
    NonFinite,
    Poisoned,
    TokenbusError,
    from_wire,
)

log = structlog.get_logger("broker.ledger")

STATE_PERIOD_S = 1.0


class LedgerActor(Actor):
    """Mailbox policy CRASH: what comes in are promises to keep; the doors bound what they send."""

    def __init__(
        self,
        system: ActorSystem,
        limits: QueueConfig,
        vocabulary: Vocabulary,
        link: Address,
        metrics: Metrics | None = None,
        engine_hang_ms: int = 60_000,
    ) -> None:
        super().__init__(system, "ledger", capacity=131_072, overflow=Overflow.CRASH)
        self.drained = asyncio.Event()  # set when a drain has left no job behind
        self._vocabulary = vocabulary
        self._metrics = metrics or Metrics()
        self._tally = Tally(self._metrics)
        self._book = Book(limits, link, self._tally)
        self._deadline_timer = DeadlineTimer(self, self._book.deadlines, self._end_overdue)
        self._flush_tally = self.guard(self._tally.flush)
        self._is_draining = False
        self._reports = Reports(self._book, self._metrics, engine_hang_ms)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            Drop: self._on_drop,
            Pause: self._on_pause,
            Unpause: self._on_unpause,
            Drain: self._on_drain,
            Steps: self._on_steps,
            RunRejected: self._on_rejected,
            EngineStats: self._on_stats,
            EngineUp: self._on_engine_up,
            EngineGone: self._on_engine_gone,
            EngineProgress: lambda _: self._reports.note_loading(),
            RingState: self._on_ring_state,
        }

    @property
    def book(self) -> Book:
        """The tables; to look at, not to touch."""
        return self._book

    def add_door(self, door: Address, *, fetches: bool = False) -> None:
        """A door to keep informed with `EngineState`, and with `Capacity` if it fetches its jobs:
        then the limits of the queue are not for it. Call before `start`.
        """
        if fetches:
            self._book.fetching.add(door)
        self._reports.add_door(door)

    def start(self) -> None:
        """Begin the regular state reports."""
        self.every(STATE_PERIOD_S, self._reports.tell_state)

    async def stop(self) -> None:
        """Write the last lines of the log."""
        self._tally.flush()

    def handle(self, message: object) -> None:
        """See the module."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise TypeError(f"the ledger takes no {type(message).__name__}")
        handler(message)

    def after_burst(self) -> None:
        """Start what may run, then tell the doors what happened."""
        self._book.start_runs()
        self._book.outbox.flush()
        self._reports.tell_capacity(self._is_draining)
        self._deadline_timer.arm()
        if self._tally:
            self._loop.call_soon(self._flush_tally)  # behind the doors' turn
        if self._is_draining and not self._book.jobs:
            self.drained.set()

    # ------------------------------------------------------------ from the doors

    def _on_submit(self, message: Submit) -> None:
        name = message.prepared.request.job
        known = self._book.jobs.get(name)
        if known is not None and self._meets_known(known, message):
            return
        if self._is_draining:
            error: TokenbusError = Draining("the worker is draining", retry_ms=1_000)
            self._book.outbox.answer(message.door, Refused(name, error, message.attempt))
            return
        job = Job(message, self._vocabulary)
        try:
            position = self._book.admit(job)
        except Busy as busy:
            self._book.outbox.answer(message.door, Refused(name, busy, message.attempt))
            return
        self._book.outbox.answer(message.door, job.accepted(position))
        reason = job.resume_text()
        if reason is not None:
            self._book.end(job, job.done(reason, time.monotonic_ns()))
        elif message.solo:
            self._book.suspect(job)

    def _meets_known(self, known: Job, message: Submit) -> bool:
        """True if the submit was answered; False if it replaces the job that was known."""
        is_same_door = known.door is message.door
        if is_same_door and message.attempt > known.attempt:
            self._book.forget(known)  # fenced: this worker itself owns the newer attempt
            return False
        is_same = known.prepared.request == message.prepared.request
        if is_same_door and message.attempt == known.attempt and is_same:
            self._book.outbox.answer(message.door, known.accepted(0))
        else:
            error = Conflict(f"job {known.name!r} is already running here", field="job")
            self._book.outbox.answer(message.door, Refused(known.name, error, message.attempt))
        return True

    def _on_cancel(self, message: Cancel) -> None:
        job = self._book.named(message.job, message.door, message.attempt)
        if job is not None:
            self._book.end(job, job.done(message.reason, time.monotonic_ns()))

    def _on_drop(self, message: Drop) -> None:
        job = self._book.named(message.job, message.door, message.attempt)
        if job is not None:
            self._book.forget(job)

    def _on_pause(self, message: Pause) -> None:
        job = self._book.named(message.job, message.door, message.attempt)
        if job is not None and not job.is_paused:
            self._book.pause(job)

    def _on_unpause(self, message: Unpause) -> None:
        job = self._book.named(message.job, message.door, message.attempt)
        if job is not None and job.is_paused:
            self._book.unpause(job)

    def _on_drain(self, message: Drain) -> None:
        self._is_draining = True
        log.info("ledger.draining", jobs=len(self._book.jobs), drain_ms=message.drain_ms)
        for job in list(self._book.jobs.values()):
            if job.state is not JobState.RUNNING:
                self._book.release(job)
        self.later(message.drain_ms / 1000, self._release_all)

    def _release_all(self) -> None:
        for job in list(self._book.jobs.values()):
            self._book.release(job)
        self.after_burst()

    # ------------------------------------------------------------ from the engine

    def _on_steps(self, message: Steps) -> None:
        self._reports.progress += len(message.steps)
        self._tally.add_steps(message.steps)
        now_ns = time.monotonic_ns()
        for job, finish in take_steps(self._book.runs, message.steps):
            if finish == Finish.NOT_FINISHED:
                self._publish(job, now_ns)
            else:
                self._finish(job, finish, now_ns)

    def _publish(self, job: Job, now_ns: int) -> None:
        """The fresh tokens of a run that goes on, unless they complete a stop string."""
        self._take_tokens(job, Finish.NOT_FINISHED, now_ns)
        if job.detokenizer.is_stopped:
            self._book.end(job, job.done("stop", now_ns))
        elif self._book.trials.is_cleared(job):
            self._book.clear(job)

    def _take_tokens(self, job: Job, finish: int, now_ns: int) -> None:
        tokens = job.take_tokens(finish, now_ns)
        if tokens is not None:
            self._book.outbox.add(job.door, tokens)
            if job.first_token_ns == now_ns:
                self._tally.add_first_token(job)

    def _finish(self, job: Job, finish: int, now_ns: int) -> None:
        """The engine ended the run."""
        self._take_tokens(job, finish, now_ns)
        if job.detokenizer.is_stopped or finish == Finish.STOP:
            self._book.end(job, job.done("stop", now_ns))
        elif finish == Finish.LENGTH:
            self._book.end(job, job.done("length", now_ns))
        elif finish == Finish.ERROR:
            self._book.end(job, job.failed(NonFinite("the model's output is not finite")))
        else:
            self._book.end(job, job.failed(Internal("the engine ended the run unasked")))

    def _on_rejected(self, message: RunRejected) -> None:
        reject = message.reject
        job = self._book.runs.ended(reject.rid)
        if job is not None:
            names = {"prompt_ids": prompt_field(job.prepared.request), "prefix_ids": "have"}
            field = names.get(reject.field, reject.field)
            self._book.end(job, job.failed(from_wire(reject.code, reject.message, field=field)))

    def _on_stats(self, message: EngineStats) -> None:
        self._reports.progress += 1
        self._reports.engine_stats = message.stats
        self._metrics.take_stats(message.stats)

    def _on_ring_state(self, message: RingState) -> None:
        self._book.runs.is_ring_full = message.is_full

    def _on_engine_up(self, message: EngineUp) -> None:
        self._book.runs.up(message)
        self._metrics.engine_up(message.max_num_seqs)
        self._reports.tell_state()

    def _on_engine_gone(self, message: EngineGone) -> None:
        self._reports.note_loading()
        self._tally.flush()
        self._metrics.engine_gone()
        computing = []
        for job in self._book.runs.gone():
            if job.is_paused:
                job.move(JobState.PAUSED)
            else:
                computing.append(job)
                job.move(JobState.SUSPECT)
        poison, suspects = self._book.trials.accuse(computing)
        if computing:
            names = [job.name for job in poison]
            log.error("engine.lost", pid=message.pid, suspects=len(suspects), poison=names)
        self._reports.tell_state(tuple(job.name for job in computing))
        for job in poison:
            text = f"the engine died {job.strikes} times with this job in it, the last time alone"
            self._book.end(job, job.failed(Poisoned(text), dead=True))
        if self._is_draining:
            self._release_all()  # nobody will start an engine for what is left

    # ------------------------------------------------------------ regular work

    def _end_overdue(self) -> None:
        now_ns = time.monotonic_ns()
        for name in self._book.deadlines.take_due(now_ns):
            job = self._book.jobs[name]
            self._book.end(job, job.done("deadline", now_ns))
        self.after_burst()
