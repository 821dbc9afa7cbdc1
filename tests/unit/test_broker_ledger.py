"""The ledger alone, between a scripted engine link and a recording door: one terminal event per job
on every path.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from broker.actor import ActorSystem
from broker.config import QueueConfig
from broker.ledger.actor import LedgerActor
from broker.ledger.deadlines import Deadlines
from broker.ledger.job import IllegalMove, Job, JobState
from broker.ledger.runs import look_ahead
from broker.ledger.trials import CLEAR_TOKENS
from broker.link_messages import (
    AbortRuns,
    EngineGone,
    EngineUp,
    PauseRuns,
    ResumeRuns,
    RingState,
    RunRejected,
    StartRun,
    Steps,
)
from broker.messages import (
    Accepted,
    Cancel,
    Capacity,
    Done,
    Drain,
    Drop,
    EngineState,
    Failed,
    Pause,
    Prepared,
    Publish,
    Refused,
    Released,
    Submit,
    Tokens,
    Unpause,
)
from broker.ring.records import Finish, Reject, Sampling, StepEvents
from broker.ring.records import Submit as Run
from broker.text.vocabulary import letters
from tokenbus.request import JobRequest, SamplingParams

ENGINE = EngineUp(100, 1000, 4, (), 7, {})
VOCABULARY = letters(26)


class Door:
    """Sorts what it is told by job."""

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {}
        self.answers: dict[str, list[Accepted | Refused]] = {}
        self.released: list[tuple[str, int]] = []
        self.slots: list[int] = []
        self.states: list[EngineState] = []
        self.publishes = 0

    def tell(self, message: object) -> bool:
        if isinstance(message, Publish):
            self.publishes += 1
            for event in message.events:
                self.events.setdefault(event.job, []).append(event)
        elif isinstance(message, Accepted | Refused):
            self.answers.setdefault(message.job, []).append(message)
        elif isinstance(message, Released):
            self.released += message.jobs
        elif isinstance(message, Capacity):
            self.slots.append(message.slots)
        elif isinstance(message, EngineState):
            self.states.append(message)
        return True

    def text(self, job: str) -> str:
        return "".join(e.text for e in self.events.get(job, []) if not isinstance(e, Failed))

    def ids(self, job: str) -> list[int]:
        return [i for e in self.events.get(job, []) if isinstance(e, Tokens) for i in e.ids]

    def end(self, job: str) -> Done | Failed:
        """The job's one terminal event, after checking that it is the only one and the last."""
        events = self.events[job]
        terminal = [e for e in events if not isinstance(e, Tokens)]
        assert terminal == [events[-1]]
        return terminal[0]


class Link:
    """Keeps the runs that were started; plays the engine on demand."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.started: list[Run] = []
        self.aborted: list[int] = []
        self.paused: list[int] = []
        self.resumed: list[int] = []

    def tell(self, message: object) -> bool:
        if isinstance(message, StartRun):
            self.runs[message.run.rid] = message.run
            self.started.append(message.run)
        elif isinstance(message, AbortRuns):
            self.aborted += message.rids
        elif isinstance(message, PauseRuns):
            self.paused += message.rids
        elif isinstance(message, ResumeRuns):
            self.resumed += message.rids
        return True


class Bench:
    """A ledger with one door; messages go through its mailbox, and `turn` lets them be handled."""

    def __init__(self, **limits: Any) -> None:
        self.system = ActorSystem(asyncio.get_running_loop())
        self.link = Link()
        self.door = Door()
        config = QueueConfig(**limits)
        self.ledger = LedgerActor(self.system, config, VOCABULARY, self.link)
        self.ledger.add_door(self.door)
        self.fetcher = Door()
        self.ledger.add_door(self.fetcher, fetches=True)
        self.step_id = 0

    async def tell(self, *messages: object) -> None:
        for message in messages:
            self.ledger.tell(message)
        for _ in range(4):
            await asyncio.sleep(0)
        if self.system.crashed.done():
            raise self.system.crashed.result().cause

    async def submit(self, *names: str, **options: Any) -> None:
        await self.tell(*(submit(name, self.door, **options) for name in names))

    async def step(self, tokens: dict[str, int], **finish: Finish) -> None:
        """One engine step: a token for each job named, and how some of them end."""
        rows = [(self.rid(name), token, finish.get(name, 0)) for name, token in tokens.items()]
        rows += [(self.rid(name), -1, f) for name, f in finish.items() if name not in tokens]
        await self.tell(Steps([self.make_step(rows)]))
        for rid, _, end in rows:
            if end:
                del self.link.runs[rid]

    async def confirm_abort(self, name: str) -> None:
        """The engine says that the run of this job, which was aborted, has ended."""
        rid = self.rid(name)
        assert rid in self.link.aborted
        await self.step({}, **{name: Finish.ABORTED})

    def make_step(self, rows: Sequence[tuple[int, int, int]]) -> StepEvents:
        self.step_id += 1
        rids, ids, finish = zip(*rows, strict=True)
        return StepEvents(
            self.step_id, 0, np.array(rids, np.uint64), np.array(ids, np.int32),
            np.array(finish, np.uint8), np.array([], np.uint64), np.array([], np.int32),
        )  # fmt: skip

    def rid(self, name: str) -> int:
        """Of the newest run whose prompt is this job's."""
        ids = prompt_of(name).tolist()
        return max(rid for rid, run in self.link.runs.items() if run.prompt_ids.tolist() == ids)

    async def crash(self) -> None:
        self.link.runs.clear()
        await self.tell(EngineGone(7))

    async def running(self) -> list[str]:
        """Jobs with a run that was started and not aborted, by their prompts."""
        return [name_of(run) for rid, run in self.link.runs.items() if rid not in self.link.aborted]


def prompt_of(name: str) -> Any:
    return np.frombuffer(name.encode(), np.uint8).astype(np.int32)


def name_of(run: Run) -> str:
    return bytes(run.prompt_ids.astype(np.uint8)).decode()


def submit(
    name: str,
    door: Door,
    *,
    attempt: int = 1,
    prefix: Iterable[int] = (),
    deadline_s: float | None = None,
    solo: bool = False,
    max_tokens: int = 8,
    stop: tuple[str, ...] = (),
    stop_ids: tuple[int, ...] = (),
    priority: Any = "normal",
    tenant: str = "",
) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, stop=stop)
    request = JobRequest(job=name, prompt=name, params=params, priority=priority, tenant=tenant)
    prepared = Prepared(request, prompt_of(name), Sampling(), stop_ids, max_tokens, 0)
    deadline_ns = None
    if deadline_s is not None:
        deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    return Submit(prepared, door, attempt, 5, tuple(prefix), deadline_ns, solo)


def crc(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, "<i4").tobytes())


# ------------------------------------------------------------ one job, every way to end

LETTERS = {"a": 0, "b": 1, "c": 2, "d": 3}


async def by_length(b: Bench) -> None:
    await b.step({"j": 2}, j=Finish.LENGTH)


async def by_stop_token(b: Bench) -> None:
    await b.step({"j": 9}, j=Finish.STOP)


async def by_stop_string(b: Bench) -> None:
    await b.step({"j": 3})  # "d" completes "bd"


async def by_cancel(b: Bench) -> None:
    await b.tell(Cancel("j"))


async def by_deadline(b: Bench) -> None:
    async with asyncio.timeout(5):
        while not isinstance(b.door.events["j"][-1], Done):
            await asyncio.sleep(0.01)


async def by_bad_logits(b: Bench) -> None:
    await b.step({}, j=Finish.ERROR)


async def by_unasked_abort(b: Bench) -> None:
    await b.step({}, j=Finish.ABORTED)


async def by_reject(b: Bench) -> None:
    await b.tell(RunRejected(Reject(b.rid("j"), "too_long", "prompt", "no room")))


ENDS = [
    (by_length, "length", [0, 1, 2], "abc"),
    (by_stop_token, "stop", [0, 1, 9], "ab"),
    (by_stop_string, "stop", [0, 1, 3], "a"),
    (by_cancel, "cancelled", [0, 1], "ab"),
    (by_deadline, "deadline", [0, 1], "ab"),
    (by_bad_logits, "non_finite", [0, 1], "a"),
    (by_unasked_abort, "internal", [0, 1], "a"),
    (by_reject, "too_long", [0, 1], "a"),
]


@pytest.mark.parametrize(("end", "reason", "ids", "text"), ENDS, ids=[e[0].__name__ for e in ENDS])
async def test_every_end_is_one_terminal_event_with_the_right_sums(
    end: Any, reason: str, ids: list[int], text: str
) -> None:
    b = Bench()
    deadline_s = 0.2 if end is by_deadline else None
    await b.tell(ENGINE)
    await b.submit("j", stop=("bd",), stop_ids=(9,), deadline_s=deadline_s)
    await b.step({"j": 0})
    await b.step({"j": 1})  # "b" may begin the stop string: held back
    assert b.door.text("j") == "a"
    await end(b)
    event = b.door.end("j")
    assert b.door.ids("j") == ids
    assert b.door.text("j") == text
    assert event.seq == len(ids)
    if isinstance(event, Done):
        assert (event.reason, event.crc) == (reason, crc(ids))
        assert event.usage.completion_tokens == len(ids)
        assert event.usage.prompt_tokens == 1
    else:
        assert (event.error.code, event.dead) == (reason, False)
    await b.tell(Cancel("j"), Cancel("j"))  # nothing follows the end
    assert b.door.end("j") is event


async def test_seqs_have_no_holes_when_steps_come_in_batches() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", "k")
    j, k = b.rid("j"), b.rid("k")
    batch = [b.make_step([(j, i, 0), (k, i + 10, 0)]) for i in range(3)]
    last = b.make_step([(j, 3, Finish.LENGTH), (k, 13, 0)])
    await b.tell(Steps([*batch, last]))
    assert [(e.seq, e.ids) for e in b.door.events["j"][:-1]] == [(1, [0, 1, 2, 3])]
    assert [(e.seq, e.ids) for e in b.door.events["k"]] == [(1, [10, 11, 12, 13])]
    assert b.door.publishes == 1
    await b.step({"k": 14})
    assert b.door.events["k"][-1].seq == 5


async def test_tokens_of_an_aborted_run_are_dropped_and_its_place_is_held_until_it_ends() -> None:
    b = Bench()
    await b.tell(ENGINE)
    names = [f"j{i}" for i in range(8)]
    await b.submit(*names)
    room = 4 + look_ahead(4)
    assert await b.running() == names[:room]
    rid = b.rid("j0")
    await b.tell(Cancel("j0"))
    assert b.link.aborted == [rid]
    await b.tell(Steps([b.make_step([(rid, 5, 0)])]))
    assert b.door.ids("j0") == []
    assert await b.running() == names[1:room]  # not yet
    await b.tell(Steps([b.make_step([(rid, -1, Finish.ABORTED)])]))
    assert await b.running() == names[1 : room + 1]


async def test_a_job_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    b = Bench()
    await b.submit("j")
    await b.tell(Cancel("j"))
    await b.tell(ENGINE)
    assert b.link.started == []
    event = b.door.end("j")
    assert isinstance(event, Done)
    assert (event.reason, event.seq, event.crc) == ("cancelled", 0, 0)


async def test_a_job_whose_deadline_passes_in_the_queue_never_reaches_the_engine() -> None:
    b = Bench()
    await b.submit("late", deadline_s=0.05)
    await b.submit("later", deadline_s=60.0)
    async with asyncio.timeout(5):
        while "late" not in b.door.events:
            await asyncio.sleep(0.01)
    await b.tell(ENGINE)
    assert b.door.end("late").reason == "deadline"  # type: ignore[union-attr]
    assert await b.running() == ["later"]


# ------------------------------------------------------------ ids, limits, capacity


async def test_the_same_submit_attaches_and_another_content_conflicts() -> None:
    b = Bench()
    other = Door()
    await b.submit("j")
    await b.submit("j")
    await b.submit("j", max_tokens=9)
    await b.tell(submit("j", other))
    kinds = [type(answer) for answer in b.door.answers["j"]]
    assert kinds == [Accepted, Accepted, Refused]
    refused = other.answers["j"][0]
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.error.field) == ("conflict", "job")


async def test_a_higher_attempt_of_the_same_door_replaces_the_job_without_an_event() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j")
    await b.step({"j": 1})
    await b.submit("j", attempt=2, prefix=[1])
    await b.step({"j": 2}, j=Finish.LENGTH)
    assert [(e.attempt, e.seq) for e in b.door.events["j"]] == [(1, 1), (2, 2), (2, 2)]


async def test_a_full_queue_refuses_with_busy_and_keeps_what_it_has() -> None:
    b = Bench(max_queued=2)
    await b.submit("a", "b", "c")
    refused = b.door.answers["c"][0]
    assert isinstance(refused, Refused)
    assert refused.error.code == "busy"
    assert refused.error.retry_ms is not None
    await b.tell(ENGINE)
    assert await b.running() == ["a", "b"]


async def test_a_full_request_ring_holds_runs_back() -> None:
    b = Bench()
    await b.tell(ENGINE, RingState(is_full=True))
    await b.submit("a")
    assert b.link.started == []
    await b.tell(RingState(is_full=False))
    assert await b.running() == ["a"]


async def test_high_priority_passes_low() -> None:
    b = Bench()
    await b.submit("low", priority="low")
    await b.submit("high", priority="high")
    await b.tell(ENGINE)
    assert [name_of(run) for run in b.link.started] == ["high", "low"]
    assert [run.priority for run in b.link.started] == [0, 2]


async def test_a_flood_leaves_rows_for_other_tenants_that_are_about() -> None:
    engine = EngineUp(100, 1000, 16, (), 7, {})
    b = Bench()
    await b.tell(engine)
    await b.submit("x", tenant="small")
    await b.step({"x": 1}, x=Finish.LENGTH)
    await b.submit(*(f"f{i:02}" for i in range(40)), tenant="flood")
    assert len(await b.running()) == 14  # of 16 rows
    await b.submit("y", tenant="small")
    assert "y" in await b.running()
    alone = Bench()
    await alone.tell(engine)
    await alone.submit(*(f"f{i:02}" for i in range(40)), tenant="flood")
    assert len(await alone.running()) == 16 + look_ahead(16)


async def test_tenants_are_separated_in_the_prefix_cache() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("a", tenant="x")
    await b.submit("b", tenant="y")
    await b.submit("c", "d")
    salts = [run.cache_salt for run in b.link.started]
    assert len(set(salts[:3])) == 3
    assert salts[2] == salts[3] == 0


# ------------------------------------------------------------ continuation


@pytest.mark.parametrize(
    ("prefix", "options", "reason"),
    [
        ([0, 1, 2], {"max_tokens": 3}, "length"),
        ([0, 1, 2], {"max_tokens": 3, "stop": ("cd",)}, "length"),  # "c" was held back, then shown
        ([0, 9], {"stop_ids": (9,)}, "stop"),
        ([0, 1, 3], {"stop": ("bd",)}, "stop"),
    ],
)
async def test_a_prefix_that_had_ended_the_job_ends_it_without_a_run(
    prefix: list[int], options: dict[str, Any], reason: str
) -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", attempt=2, prefix=prefix, **options)
    event = b.door.end("j")
    assert isinstance(event, Done)
    assert (event.reason, event.text, event.crc) == (reason, "", crc(prefix))
    assert b.link.started == []


async def test_a_continued_job_repeats_no_text_and_keeps_what_was_held_back() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", attempt=2, prefix=[0, 1], stop=("bd",))  # "a" was shown, "b" held back
    assert b.link.started[0].prefix_ids.tolist() == [0, 1]
    await b.step({"j": 2})
    assert b.door.events["j"] == [Tokens("j", 2, 3, [2], "bc")]


# ------------------------------------------------------------ pause


async def test_a_paused_run_keeps_its_place_until_another_job_needs_it() -> None:
    b = Bench()
    await b.tell(ENGINE)
    names = [f"j{i}" for i in range(6)]
    await b.submit(*names)
    await b.tell(Pause("j0"), Pause("j0"))
    rid = b.rid("j0")
    assert b.link.paused == [rid]
    await b.tell(Unpause("j0"))
    assert b.link.resumed == [rid]
    await b.tell(Pause("j0"))
    assert b.link.aborted == []
    await b.submit("next")
    assert b.link.aborted == [rid]
    await b.tell(Steps([b.make_step([(rid, -1, Finish.ABORTED)])]))
    assert "next" in await b.running()
    await b.tell(Unpause("j0"))
    await b.step({"j1": 0}, j1=Finish.LENGTH)
    assert "j0" in await b.running()
    assert "j0" not in b.door.events


async def test_one_waiting_job_costs_one_paused_run_its_place_however_long_that_takes() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit(*(f"j{i}" for i in range(6)))
    await b.tell(Pause("j0"), Pause("j1"), Pause("j2"))
    await b.submit("next")
    await b.step({"j3": 1})
    await b.step({"j3": 1})
    assert b.link.aborted == [b.rid("j0")]
    await b.submit("more")
    assert b.link.aborted == [b.rid("j0"), b.rid("j1")]


async def test_a_job_paused_in_the_queue_waits_and_can_be_cancelled() -> None:
    b = Bench()
    await b.submit("j", "k")
    await b.tell(Pause("j"), Pause("k"), ENGINE)
    assert b.link.started == []
    await b.tell(Cancel("j"), Unpause("k"))
    assert await b.running() == ["k"]
    assert b.door.end("j").reason == "cancelled"  # type: ignore[union-attr]


async def test_drop_forgets_a_job_without_an_event() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j")
    await b.step({"j": 1})
    await b.tell(Drop("j"), Drop("unknown"))
    assert b.link.aborted == [b.rid("j")]
    assert len(b.door.events["j"]) == 1


# ------------------------------------------------------------ loss of the engine


async def test_after_a_crash_the_suspects_run_alone_and_continue_at_the_next_seq() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("a", "b")
    await b.step({"a": 1, "b": 2})
    await b.submit("new")
    await b.crash()
    assert b.door.states[-1].suspects == ("a", "b", "new")
    assert not b.door.states[-1].ready
    await b.tell(ENGINE)
    run = b.link.started[-1]
    assert await b.running() == ["a"]
    assert (run.solo, run.prefix_ids.tolist()) == (True, [1])
    for token in range(CLEAR_TOKENS):
        await b.step({"a": token})
    await b.confirm_abort("a")  # cleared: goes back to run beside the others
    assert await b.running() == ["b"]
    await b.step({"b": 3}, b=Finish.LENGTH)  # ends on trial
    assert await b.running() == ["new"]
    for token in range(CLEAR_TOKENS):
        await b.step({"new": token})
    # The last suspect is cleared: both start again beside each other, "new" under a new rid.
    assert sorted({name_of(run) for run in b.link.started[-2:]}) == ["a", "new"]
    assert [run.solo for run in b.link.started[-2:]] == [False, False]
    assert b.door.ids("a") == [1, 0, 1, 2, 3]
    assert b.door.ids("b") == [2, 3]


async def test_the_job_that_kills_the_engine_three_times_is_dead_and_its_neighbours_complete() -> (
    None
):
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("good", "evil", "fine")
    crashes = 0

    async def run_until_quiet() -> None:
        nonlocal crashes
        for _ in range(60):
            live = await b.running()
            if not live:
                return
            if "evil" in live:
                crashes += 1
                await b.crash()
                await b.tell(ENGINE)
                continue
            for name in live:
                await b.step({name: 1})
                if b.rid(name) in b.link.aborted:
                    await b.confirm_abort(name)
                elif len(b.door.ids(name)) >= 8:
                    await b.step({}, **{name: Finish.LENGTH})

    await run_until_quiet()
    assert crashes == 3
    dead = b.door.end("evil")
    assert isinstance(dead, Failed)
    assert (dead.error.code, dead.dead) == ("poisoned", True)
    for name in ("good", "fine"):
        end = b.door.end(name)
        assert isinstance(end, Done)
        assert end.reason == "length"


async def test_an_outside_kill_now_and_then_charges_nobody() -> None:
    """One job alone in the engine, which dies ten times, with progress in between."""
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j", max_tokens=1000)
    for _ in range(10):
        for token in range(CLEAR_TOKENS):
            await b.step({"j": token})
        if b.rid("j") in b.link.aborted:
            await b.confirm_abort("j")
        await b.crash()
        await b.tell(ENGINE)
    assert not any(isinstance(e, Failed) for e in b.door.events["j"])
    assert len(b.door.ids("j")) == 10 * CLEAR_TOKENS


async def test_a_suspect_from_elsewhere_runs_alone() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("a")
    await b.step({"a": 1})
    await b.submit("s", solo=True)
    await b.submit("b")
    assert len(b.link.started) == 1
    await b.confirm_abort("a")  # it makes room, however long it would have run
    assert [(name_of(r), r.solo) for r in b.link.started[1:]] == [("s", True)]
    await b.step({"s": 1}, s=Finish.LENGTH)
    assert await b.running() == ["a", "b"]
    await b.step({"a": 2}, a=Finish.LENGTH)
    assert b.door.ids("a") == [1, 2]


async def test_a_suspect_can_be_cancelled_paused_and_dropped() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("a", "b", "c", "d")
    await b.crash()
    await b.tell(Cancel("a"), Drop("b"), Pause("c"))
    await b.tell(ENGINE)
    assert await b.running() == ["d"]
    await b.tell(Pause("d"), Unpause("c"))
    assert b.link.aborted == [b.rid("d")]
    await b.confirm_abort("d")
    assert [name_of(b.link.started[-1]), b.link.started[-1].solo] == ["c", True]
    assert b.door.end("a").reason == "cancelled"  # type: ignore[union-attr]
    assert "b" not in b.door.events


# ------------------------------------------------------------ drain


async def test_drain_releases_the_queue_finishes_the_running_and_refuses_new_jobs() -> None:
    b = Bench()
    await b.tell(ENGINE)
    names = [f"j{i}" for i in range(8)]
    await b.submit(*names)
    await b.tell(Drain(60_000))
    assert b.door.released == [("j6", 1), ("j7", 1)]
    await b.submit("new")
    refused = b.door.answers["new"][0]
    assert isinstance(refused, Refused)
    assert refused.error.code == "draining"
    assert b.fetcher.slots[-1] == 0
    await b.step(dict.fromkeys(names[:6], 1), **dict.fromkeys(names[:6], Finish.LENGTH))
    assert b.ledger.drained.is_set()
    assert all(isinstance(b.door.end(name), Done) for name in names[:6])
    await b.ledger.close()


async def test_what_does_not_finish_in_time_is_released_without_an_event() -> None:
    b = Bench()
    await b.tell(ENGINE)
    await b.submit("j")
    await b.step({"j": 1})
    await b.tell(Drain(20))
    await asyncio.wait_for(b.ledger.drained.wait(), 5)
    assert b.door.released == [("j", 1)]
    assert b.link.aborted == [b.rid("j")]
    assert [type(e) for e in b.door.events["j"]] == [Tokens]


# ------------------------------------------------------------ parts


async def test_illegal_moves_are_errors_that_name_both_states() -> None:
    job = Job(submit("j", Door()), VOCABULARY)
    job.move(JobState.RUNNING)
    job.move(JobState.ENDED)
    with pytest.raises(IllegalMove, match="ended -> running"):
        job.move(JobState.RUNNING)


def test_deadlines_come_in_order_and_forget_the_removed() -> None:
    deadlines = Deadlines()
    for i in range(1000):
        deadlines.add(f"j{i}", 1000 - i)
    for i in range(0, 1000, 2):
        deadlines.remove(f"j{i}")
    assert deadlines.next_ns() == 1
    assert deadlines.take_due(9) == [f"j{i}" for i in (999, 997, 995, 993, 991)]
    assert deadlines.next_ns() == 11
    for i in range(1000):
        deadlines.remove(f"j{i}")
    assert deadlines.next_ns() is None
