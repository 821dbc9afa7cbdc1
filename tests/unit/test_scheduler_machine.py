"""Random lives of runs against a strict runner: whatever happens around it, a run's output is
its own.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from broker.ring.records import Finish, Submit
from tests.unit.engine_harness import VOCAB, Harness, make_runner, make_submit, sampled, undisturbed

PROMPTS = [[7] * 4, [7] * 8, [1, 2, 3], [5], list(range(20)), [7] * 4 + list(range(13)), [9] * 11]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, aborts, pauses and resumes at random between steps, with little room of
    everything.
    """

    @initialize(
        is_async=st.booleans(),
        num_blocks=st.integers(6, 16),
        num_rows=st.integers(1, 5),
        budget=st.integers(1, 12),
        cache=st.booleans(),
        align=st.sampled_from([0, 1, 2, 3, 4, 8]),
    )
    def start(
        self, is_async: bool, num_blocks: int, num_rows: int, budget: int, cache: bool, align: int
    ) -> None:
        """align: 0 for a runner that computes output tokens in any way."""
        runner = make_runner(
            num_blocks=num_blocks,
            num_rows=num_rows,
            budget=max(budget, num_rows, align),
            max_len=40,
            is_async=is_async,
            nan_token=96,
            chunk_align_tokens=max(align, 1),
            replays_by_decode=align > 0,
        )
        self.harness = Harness(runner, cache)
        self.runs: dict[int, Submit] = {}
        self.paused: set[int] = set()
        self.room = min(40, num_blocks * 4)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        extra=st.lists(st.integers(0, 90), max_size=6),
        max_tokens=st.integers(1, 24),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=12),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 2),
        seed=st.none() | st.integers(0, 3),
        solo=st.sampled_from([False] * 7 + [True]),
        salt=st.sampled_from([0, 0, 0, 1]),
        is_bad=st.sampled_from([False] * 9 + [True]),
        num_prefix=st.integers(0, 8),
    )
    def submit(
        self,
        prompt: list[int],
        extra: list[int],
        max_tokens: int,
        stop: list[int],
        min_tokens: int,
        priority: int,
        seed: int | None,
        solo: bool,
        salt: int,
        is_bad: bool,
        num_prefix: int,
    ) -> None:
        """num_prefix: output tokens that an earlier attempt gave, if the run has so many."""
        rid = len(self.runs) + 1
        fields: dict[str, object] = {
            "stop": stop,
            "min_tokens": min_tokens if not stop else 0,
            "priority": priority,
            "solo": solo,
            "cache_salt": salt,
        }
        if seed is not None:
            fields["sampling"] = sampled(seed)
        ids = prompt + extra + ([96] if is_bad else [])
        self.runs[rid] = make_submit(rid, ids, max_tokens, **fields)
        if not is_bad:
            fields["prefix"] = undisturbed(self.runs[rid])[:-1][:num_prefix]
            self.runs[rid] = make_submit(rid, ids, max_tokens, **fields)
        reject = self.harness.scheduler.submit(self.runs[rid])
        if reject is not None:
            assert reject.code == "too_long"
            assert len(ids) + len(self.runs[rid].prefix_ids) >= self.room
            self.runs[rid] = make_submit(rid, [1], 1)
            self.harness.scheduler.submit(self.runs[rid])

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.runs)))
        self.harness.scheduler.abort(rid)
        self.paused.discard(rid)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.runs)))
        self.harness.scheduler.pause(rid)
        if rid not in self.harness.finish:
            self.paused.add(rid)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.paused)))
        self.harness.scheduler.resume(rid)
        self.paused.discard(rid)

    @rule()
    def everything_unpaused_finishes(self) -> None:
        """Paused runs never stand in the way of others."""
        self.harness.run()
        left = set(self.runs) - set(self.harness.finish)
        assert left <= self.paused, f"runs {left - self.paused} did not finish"

    @invariant()
    def outputs_are_prefixes_of_the_undisturbed_ones(self) -> None:
        if not hasattr(self, "harness"):
            return
        for rid, tokens in self.harness.tokens.items():
            expected = undisturbed(self.runs[rid])[len(self.runs[rid].prefix_ids) :]
            assert expected[: len(tokens)] == tokens, f"run {rid}"

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for rid in sorted(self.paused):
            self.harness.scheduler.resume(rid)
        self.harness.run()
        for rid, submit in self.runs.items():
            self._check_end(rid, submit)
        self.harness.assert_at_rest()

    def _check_end(self, rid: int, submit: Submit) -> None:
        """Exactly one end, and the one that the run's own tokens call for."""
        tokens, finish = self.harness.tokens.get(rid, []), self.harness.finish[rid]
        if finish == Finish.ABORTED:
            return
        if 96 in submit.prompt_ids:
            assert (finish, tokens) == (Finish.ERROR, [])
            return
        room = self.room - len(submit.prompt_ids)
        expected = undisturbed(submit)
        assert expected[len(submit.prefix_ids) : room] == tokens
        is_stopped = len(expected) <= room and expected[-1] in submit.stop_token_ids
        assert finish == (Finish.STOP if is_stopped else Finish.LENGTH)


# A time-out in the middle of an example reads as FlakyStrategyDefinition: leave it room.
TestSchedulerMachine = pytest.mark.timeout(600)(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
