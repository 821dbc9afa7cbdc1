"""Random lives of jobs: submits, steps, cancels, pauses, crashes, drops, in any order. At the end
an auditor counts: one terminal event per job, seqs 1..N, CRC and text right.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.actor import ActorSystem
from broker.config import QueueConfig
from broker.ledger.actor import LedgerActor
from broker.ledger.job import JobState
from broker.link_messages import (
    AbortRuns,
    EngineGone,
    EngineUp,
    PauseRuns,
    ResumeRuns,
    RingState,
    StartRun,
    Steps,
)
from broker.messages import (
    Accepted,
    Cancel,
    Done,
    Drop,
    Failed,
    Pause,
    Prepared,
    Publish,
    Refused,
    Submit,
    Tokens,
    Unpause,
)
from broker.ring.records import Finish, Sampling, StepEvents
from broker.ring.records import Submit as Run
from broker.text.vocabulary import letters
from tokenbus.request import JobRequest, SamplingParams

MAX_TOKENS = 12


def token_at(prompt: int, index: int) -> int:
    """The output token of a prompt at an index: fixed, so that every attempt gives the same."""
    return (prompt * 7 + index * index * 5 + index) % 26


class Engine:
    """Plays engine and link: runs in order, tokens by `token_at`."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.produced: dict[int, int] = {}
        self.paused: set[int] = set()
        self.aborted: list[int] = []

    def tell(self, message: object) -> bool:
        if isinstance(message, StartRun):
            run = message.run
            prompt = int(run.prompt_ids[0])
            assert run.prefix_ids.tolist() == [
                token_at(prompt, i) for i in range(len(run.prefix_ids))
            ]
            assert len(run.prefix_ids) < run.max_tokens
            self.runs[run.rid] = run
            self.produced[run.rid] = len(run.prefix_ids)
        elif isinstance(message, AbortRuns):
            self.aborted += message.rids
        elif isinstance(message, PauseRuns):
            self.paused.update(message.rids)
        elif isinstance(message, ResumeRuns):
            self.paused.difference_update(message.rids)
        return True

    def step(self, number: int) -> StepEvents:
        """Every run that is not paused gets a token; the aborted ones end."""
        rows = []
        for rid in list(self.runs):
            if rid in self.aborted:
                rows.append((rid, -1, Finish.ABORTED))
                self.drop(rid)
            elif rid not in self.paused:
                run, index = self.runs[rid], self.produced[rid]
                self.produced[rid] += 1
                is_last = index + 1 == run.max_tokens
                token = token_at(int(run.prompt_ids[0]), index)
                rows.append((rid, token, Finish.LENGTH if is_last else Finish.NOT_FINISHED))
                if is_last:
                    self.drop(rid)
        none64, none32 = np.array([], np.uint64), np.array([], np.int32)
        rids, ids, ends = ([row[i] for row in rows] for i in range(3))
        return StepEvents(
            number, 0, np.array(rids, np.uint64), np.array(ids, np.int32),
            np.array(ends, np.uint8), none64, none32,
        )  # fmt: skip

    def drop(self, rid: int) -> None:
        del self.runs[rid], self.produced[rid]
        self.paused.discard(rid)

    def die(self) -> None:
        self.runs.clear()
        self.produced.clear()
        self.paused.clear()
        self.aborted.clear()


class Door:
    """What a door must see."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.ends: dict[str, Done | Failed] = {}
        self.refused: set[str] = set()

    def tell(self, message: object) -> bool:
        if isinstance(message, Accepted):
            self.ids.setdefault(message.job, [])
            self.text.setdefault(message.job, "")
        elif isinstance(message, Refused):
            self.refused.add(message.job)
        elif isinstance(message, Publish):
            for event in message.events:
                self.take(event)
        return True

    def take(self, event: Any) -> None:
        job = event.job
        assert job not in self.ends, f"{job}: an event after the end"
        if isinstance(event, Tokens):
            assert event.seq == len(self.ids[job]) + 1, f"{job}: a hole or a repeat"
            self.ids[job] += event.ids
            self.text[job] += event.text
            return
        self.ends[job] = event
        assert event.seq == len(self.ids[job])
        if isinstance(event, Done):
            self.text[job] += event.text
            assert event.crc == zlib.crc32(np.array(self.ids[job], "<i4").tobytes())


class LedgerMachine(RuleBasedStateMachine):
    """Calls the ledger's handlers directly: one message, one burst."""

    @initialize(seqs=st.integers(1, 4))
    def begin(self, seqs: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine, self.door = Engine(), Door()
        limits = QueueConfig(max_queued=6)
        system = ActorSystem(self.loop)
        self.ledger = LedgerActor(system, limits, letters(26), self.engine)
        self.seqs = seqs
        self.is_up = False
        self.steps = 0
        self.names: list[str] = []
        self.stops: dict[str, str] = {}
        self.dropped: set[str] = set()

    def tell(self, message: object) -> None:
        self.ledger.handle(message)
        self.ledger.after_burst()

    @rule(stop=st.sampled_from(["", "a", "qx", "zz", "bf"]), max_tokens=st.integers(1, MAX_TOKENS))
    def submit(self, stop: str, max_tokens: int) -> None:
        number = len(self.names)
        name = f"j{number}"
        self.names.append(name)
        self.stops[name] = stop
        params = SamplingParams(stop=(stop,) if stop else ())
        prompt = np.array([number], np.int32)
        request = JobRequest(job=name, prompt="x", params=params)
        prepared = Prepared(request, prompt, Sampling(), (), max_tokens, 0)
        self.tell(Submit(prepared, self.door, 1, 0))

    @rule()
    def engine_comes(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.tell(EngineUp(26, 100, self.seqs, (), 1, {}))

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        if self.is_up:
            steps = []
            for _ in range(count):
                self.steps += 1
                steps.append(self.engine.step(self.steps))
            self.tell(Steps(steps))

    @rule()
    def crash(self) -> None:
        if self.is_up:
            self.is_up = False
            self.engine.die()
            self.tell(EngineGone(1))

    @rule(is_full=st.booleans())
    def ring(self, is_full: bool) -> None:
        if self.is_up:
            self.tell(RingState(is_full))

    @rule(data=st.data(), what=st.sampled_from([Cancel, Pause, Unpause, Drop]))
    def disturb(self, data: st.DataObject, what: Any) -> None:
        if self.names:
            name = data.draw(st.sampled_from(self.names))
            if what is Drop and name not in self.door.ends:
                self.dropped.add(name)
            self.tell(what(name))

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        book = self.ledger._book
        running = {job.name for job in book.runs.by_rid.values()}
        suspects = {job.name for job in book.trials.waiting()}
        for name, job in book.jobs.items():
            assert job.state is not JobState.ENDED
            assert (name in running) == (job.state is JobState.RUNNING)
            assert (name in suspects) == (job.state is JobState.SUSPECT)
        queued = sum(job.state is JobState.QUEUED for job in book.jobs.values())
        assert len(book.queue) == queued

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.engine_comes()
        self.tell(RingState(False))
        for name in self.names:
            self.tell(Unpause(name))
        for _ in range(60 * (len(self.names) + 1)):
            if not self.ledger._book.jobs:
                break
            self.step(1)
        assert not self.ledger._book.jobs, "a job never ended"
        for name in self.names:
            self.audit(name)
        self.loop.close()

    def audit(self, name: str) -> None:
        door = self.door
        if name in door.refused or name in self.dropped:
            assert name not in door.ends
            return
        end = door.ends[name]
        prompt = int(name[1:])
        ids = [token_at(prompt, i) for i in range(len(door.ids[name]))]
        assert door.ids[name] == ids
        text = "".join(chr(97 + i) for i in ids)
        stop = self.stops[name]
        if isinstance(end, Done) and end.reason == "stop":
            assert text.index(stop) == len(door.text[name])
            assert text.index(stop) + len(stop) == len(text)
        if isinstance(end, Done):
            assert door.text[name] == (text[: text.index(stop)] if end.reason == "stop" else text)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
