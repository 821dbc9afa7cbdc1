"""Lives of runs in the scheduler, against a runner that checks each plan and the KV it reads."""

from __future__ import annotations

import numpy as np
import pytest

from broker.ring.records import Finish, Reject
from engine.block_manager import BlockManager
from engine.errors import IntegrityError
from engine.plan import StepPlan, StepResult
from engine.request import accept
from engine.residency import Residency
from engine.rows import RowTable
from engine.scheduler import Scheduler
from tests.unit.engine_harness import Harness, make_runner, make_submit, sampled, undisturbed

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "one_ahead"])


@BOTH
def test_runs_give_their_undisturbed_tokens_side_by_side(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    runs = [harness.submit(rid, list(range(rid, 3 * rid)), 5 + rid) for rid in range(1, 8)]
    harness.run()
    for run in runs:
        assert harness.tokens[run.rid] == undisturbed(run)
        assert harness.finish[run.rid] == Finish.LENGTH
    harness.assert_at_rest()


@BOTH
@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_a_prompt_in_chunks_gives_the_same_tokens(is_async: bool, budget: int) -> None:
    harness = Harness(make_runner(is_async=is_async, budget=budget))
    runs = [harness.submit(rid, list(range(30)), 6) for rid in (1, 2)]
    harness.run()
    assert [harness.tokens[run.rid] for run in runs] == [undisturbed(run) for run in runs]


def test_decode_rows_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    harness = Harness(make_runner(budget=8))
    harness.submit(1, [1, 2], 20)
    harness.step()
    harness.submit(2, list(range(30)), 4)
    plan = harness.scheduler.plan()
    assert plan is not None
    assert (plan.num_decode, plan.rows.tolist(), plan.num_new.tolist()) == (1, [0, 1], [1, 7])
    assert plan.sample.tolist() == [True, False]


def test_the_next_step_is_planned_without_the_tokens_of_the_one_in_flight() -> None:
    scheduler = Scheduler(make_runner(is_async=True).info)
    scheduler.submit(make_submit(1, [1, 2, 3], 10))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    assert (first.num_computed.tolist(), first.num_new.tolist()) == ([0], [3])
    assert (second.num_computed.tolist(), second.num_new.tolist()) == ([3], [1])


@BOTH
def test_a_stop_id_ends_the_run_and_its_over_run_token_is_dropped(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    stop = undisturbed(make_submit(1, [1, 2, 3], 20))[6]
    run = harness.submit(1, [1, 2, 3], 20, stop=[stop])
    harness.run()
    assert harness.tokens[1] == undisturbed(run)
    assert harness.tokens[1][-1] == stop
    assert harness.finish[1] == Finish.STOP
    harness.assert_at_rest()


@BOTH
def test_more_stop_ids_than_the_vectorised_test_holds_work_too(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    tokens = undisturbed(make_submit(1, [1, 2, 3], 20))
    never = [token for token in range(90) if token not in tokens][:11]
    run = harness.submit(1, [1, 2, 3], 20, stop=[*never, tokens[6]])
    harness.run()
    assert harness.tokens[1] == undisturbed(run) == tokens[: len(harness.tokens[1])]
    assert harness.finish[1] == Finish.STOP
    harness.assert_at_rest()


def test_a_stop_id_below_min_tokens_does_not_end_the_run() -> None:
    harness = Harness(make_runner())
    alone = undisturbed(make_submit(1, [1, 2, 3], 20))
    harness.submit(1, [1, 2, 3], 20, stop=[alone[2]], min_tokens=5)
    harness.run()
    assert len(harness.tokens[1]) >= 5
    assert alone[2] not in harness.tokens[1][:5]


STAGES = ["waiting", "mid_chunk", "last_chunk", "decoding", "finished"]


@BOTH
@pytest.mark.parametrize("stage", STAGES)
def test_abort_gives_one_end_at_every_stage(is_async: bool, stage: str) -> None:
    harness = Harness(make_runner(is_async=is_async, num_rows=2, budget=8))
    harness.submit(1, [5] * 9, 12)
    run = harness.submit(2, list(range(20)), 3)
    steps = {"waiting": 0, "mid_chunk": 2, "last_chunk": 4, "decoding": 5, "finished": 40}[stage]
    for _ in range(steps):
        harness.step()
    harness.scheduler.abort(2)
    harness.scheduler.abort(2)
    harness.run()
    expected = Finish.LENGTH if stage == "finished" else Finish.ABORTED
    assert harness.finish[2] == expected
    assert undisturbed(run)[: len(harness.tokens[2])] == harness.tokens[2]
    assert harness.finish[1] == Finish.LENGTH
    harness.assert_at_rest()


@BOTH
def test_an_id_can_be_used_again_at_once_after_its_abort(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    harness.submit(1, [1, 2, 3], 20)
    for _ in range(3):
        harness.step()
    harness.scheduler.abort(1)
    harness._take_ends()
    assert harness.finish.pop(1) == Finish.ABORTED
    harness.tokens.clear()
    harness.cached.clear()
    again = harness.submit(1, [9, 8, 7], 6)
    harness.run()
    assert harness.tokens[1] == undisturbed(again)
    assert harness.finish[1] == Finish.LENGTH
    harness.assert_at_rest()


def test_a_live_id_cannot_be_used_twice() -> None:
    harness = Harness(make_runner())
    harness.submit(1, [1], 5)
    assert harness.reject(make_submit(1, [2], 5)).field == "rid"


@BOTH
def test_three_runs_with_kv_for_two_are_preempted_and_answer_the_same(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async, num_blocks=9, budget=16))
    runs = [
        harness.submit(rid, [rid] * 8, 16, sampling=sampled(rid), min_tokens=3) for rid in (1, 2, 3)
    ]
    harness.run()
    assert harness.scheduler.preemptions > 0
    for run in runs:
        assert harness.tokens[run.rid] == undisturbed(run)
    harness.assert_at_rest()


def test_the_latest_arrival_of_the_lowest_priority_is_preempted_first() -> None:
    harness = Harness(make_runner(num_blocks=9, budget=64))
    order: list[int] = []
    for rid, priority in ((1, 2), (2, 0), (3, 1)):
        harness.submit(rid, [rid] * 8, 16, priority=priority)
    harness.run(until=lambda: harness.scheduler.preemptions > 0)
    rows = harness.scheduler.rows
    victims = [int(rows.rid[row]) for _, row in harness.scheduler._residency.homeless]
    assert victims == [1]
    harness.run(until=lambda: order.extend(set(harness.finish) - set(order)) or len(order) == 3)
    assert order[-1] == 1


def test_waiting_runs_enter_by_priority_then_arrival() -> None:
    harness = Harness(make_runner(num_rows=1))
    harness.submit(1, [1], 3, priority=1)
    harness.step()
    for rid, priority in ((2, 2), (3, 1), (4, 1), (5, 0)):
        harness.submit(rid, [rid], 3, priority=priority)
    harness.run()
    assert list(harness.cached) == [1, 5, 3, 4, 2]


def test_a_high_priority_run_takes_the_row_of_a_low_one_which_continues_later() -> None:
    harness = Harness(make_runner(num_rows=1, is_async=True))
    low = harness.submit(1, [1, 2, 3], 20, priority=2)
    for _ in range(6):
        harness.step()
    high = harness.submit(2, [4, 5], 4, priority=0)
    harness.run()
    assert list(harness.finish) == [2, 1]
    assert harness.tokens[1] == undisturbed(low)
    assert harness.tokens[2] == undisturbed(high)


@BOTH
def test_the_same_prompt_again_hits_the_cache_and_still_computes_a_token(is_async: bool) -> None:
    """A prompt of exactly three blocks: the last block is computed again, never a step of no
    token.
    """
    harness = Harness(make_runner(is_async=is_async))
    first = harness.submit(1, [7] * 12, 5)
    harness.run()
    second = harness.submit(2, [7] * 12, 5)
    harness.run()
    assert harness.cached == {1: 0, 2: 8}
    assert harness.tokens[1] == harness.tokens[2] == undisturbed(first) == undisturbed(second)


def test_a_conversation_finds_the_earlier_answer_in_the_cache() -> None:
    harness = Harness(make_runner())
    harness.submit(1, list(range(8)), 9)
    harness.run()
    harness.submit(2, [*range(8), *harness.tokens[1], 50], 2)
    harness.run()
    assert harness.cached[2] == 16


def test_salts_separate_equal_prompts() -> None:
    harness = Harness(make_runner())
    harness.submit(1, [7] * 12, 2, cache_salt=1)
    harness.run()
    harness.submit(2, [7] * 12, 2, cache_salt=2)
    harness.run()
    assert harness.cached[2] == 0


def test_a_prompt_in_the_same_step_does_not_share_blocks_that_are_not_launched() -> None:
    harness = Harness(make_runner(budget=64))
    for rid in (1, 2):
        harness.submit(rid, [7] * 12, 2)
    plan = harness.scheduler.plan()
    assert plan is not None
    assert plan.num_computed.tolist() == [0, 0]


def test_a_run_continues_from_the_output_of_an_earlier_attempt() -> None:
    harness = Harness(make_runner())
    run = make_submit(1, [1, 2, 3], 10, sampling=sampled(5))
    expected = undisturbed(run)
    harness.submit(1, [1, 2, 3], 10, sampling=sampled(5), prefix=expected[:4])
    harness.run()
    assert harness.tokens[1] == expected[4:]
    assert harness.finish[1] == Finish.LENGTH


@BOTH
def test_same_seed_gives_same_tokens_alone_and_in_company(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    harness.submit(1, [1, 2, 3], 10, sampling=sampled(1))
    for rid in (2, 3):
        harness.submit(rid, [1, 2, 3], 10, sampling=sampled(1))
    harness.submit(4, [1, 2, 3], 10, sampling=sampled(2))
    harness.run()
    assert harness.tokens[1] == harness.tokens[2] == harness.tokens[3] != harness.tokens[4]


@BOTH
def test_a_paused_run_computes_nothing_and_goes_on_where_it_was(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async))
    run = harness.submit(1, [1, 2, 3], 20)
    for _ in range(5):
        harness.step()
    harness.scheduler.pause(1)
    harness.run()
    count = len(harness.tokens[1])
    assert 0 < count < 20
    assert harness.scheduler.blocks.num_used > 0
    harness.scheduler.resume(1)
    harness.run()
    assert harness.tokens[1] == undisturbed(run)
    assert harness.scheduler.preemptions == 0


def test_a_waiting_run_can_be_paused_and_resumed() -> None:
    harness = Harness(make_runner(num_rows=1))
    run = harness.submit(1, [1, 2, 3], 4)
    harness.scheduler.pause(1)
    harness.run()
    assert harness.tokens == {}
    harness.scheduler.resume(1)
    harness.run()
    assert harness.tokens[1] == undisturbed(run)


@BOTH
def test_paused_runs_give_up_kv_and_rows_for_others(is_async: bool) -> None:
    """Slow readers on all rows and all blocks do not stop the engine."""
    harness = Harness(make_runner(is_async=is_async, num_rows=2, num_blocks=8))
    paused = [harness.submit(rid, [rid] * 10, 16) for rid in (1, 2)]
    for _ in range(5):
        harness.step()
    for run in paused:
        harness.scheduler.pause(run.rid)
    others = [harness.submit(rid, [rid] * 10, 16) for rid in (3, 4, 5)]
    harness.run()
    assert set(harness.finish) == {3, 4, 5}
    for run in paused:
        harness.scheduler.resume(run.rid)
    harness.run()
    for run in (*paused, *others):
        assert harness.tokens[run.rid] == undisturbed(run)
    harness.assert_at_rest()


class Watching:
    """A runner that notes which runs each plan names, and those launched over a step of others."""

    def __init__(self, **sizes: int) -> None:
        self.inner = make_runner(is_async=True, **sizes)
        self.info, self.is_async = self.inner.info, True
        self.rid_of: dict[int, int] = {}
        self.batches: list[set[int]] = []
        self.in_flight: list[set[int]] = []
        self.in_company: set[int] = set()

    def launch(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.rid_of[new.row] = int(new.token_ids[0])  # each run's prompt repeats its rid
        rids = {self.rid_of[row] for row in plan.rows.tolist()}
        if 3 in set.union(rids, *self.in_flight):
            self.in_company |= set.union(rids, *self.in_flight) - {3}
        self.batches.append(rids)
        self.in_flight.append(rids)
        self.inner.launch(plan)

    def collect(self) -> StepResult:
        self.in_flight.pop(0)
        return self.inner.collect()


def test_a_solo_run_is_alone_in_every_batch_and_in_flight() -> None:
    runner = Watching(num_rows=4, num_blocks=12)
    harness = Harness(runner)  # type: ignore[arg-type]
    runs = [harness.submit(rid, [rid] * 6, 14) for rid in (1, 2)]
    for _ in range(4):
        harness.step()
    solo = harness.submit(3, [3] * 6, 14, solo=True)
    runs.append(harness.submit(4, [4] * 6, 14))
    harness.run()
    assert harness.tokens[3] == undisturbed(solo)
    first = next(i for i, rids in enumerate(runner.batches) if 3 in rids)
    last = max(i for i, rids in enumerate(runner.batches) if 3 in rids)
    assert runner.batches[first : last + 1] == [{3}] * 14
    assert runner.in_company == set()
    for run in runs:
        assert harness.tokens[run.rid] == undisturbed(run)


@BOTH
def test_a_solo_run_whose_whole_prompt_is_cached_starts_with_its_known_output(
    is_async: bool,
) -> None:
    runner = make_runner(is_async=is_async, chunk_align_tokens=4, replays_by_decode=True)
    harness = Harness(runner)
    first = harness.submit(1, [7] * 8, 6)
    harness.run()
    given = undisturbed(first)[:3]
    solo = harness.submit(2, [7] * 8, 6, prefix=given, solo=True)
    harness.run()
    assert harness.finish[2] == Finish.LENGTH
    assert given + harness.tokens[2] == undisturbed(solo)


def test_a_row_that_loses_its_blocks_and_gets_others_is_told_of_the_last_ones_once() -> None:
    info = make_runner().info
    table = RowTable(info)
    residency = Residency(table, BlockManager(info.num_blocks, info.block_size))
    request = accept(make_submit(1, [7] * 10), info, 0)
    assert not isinstance(request, Reject)
    residency.waiting.push(request)
    row = residency.admit_next()
    assert row is not None
    residency.preempt(row)
    assert residency.give_kv(row)
    residency.grow(np.array([row]))
    rows, cols, block_ids = residency.rows.take_changes()
    assert rows.tolist() == [row] * 4
    assert cols.tolist() == [0, 1, 2, 3]
    assert block_ids.tolist() == table.blocks_of(row)
    assert [len(part) for part in residency.rows.take_changes()] == [0, 0, 0]


@BOTH
def test_bad_logits_end_that_run_only_and_its_blocks_leave_the_cache(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async, nan_token=96))
    fine = harness.submit(1, [1] * 8, 10)
    harness.submit(2, [2] * 8 + [96], 10)
    harness.run()
    assert (harness.finish[2], harness.tokens[2]) == (Finish.ERROR, [])
    assert harness.tokens[1] == undisturbed(fine)
    harness.submit(3, [2] * 8 + [5], 2)
    harness.run()
    assert harness.cached[3] == 0
    harness.assert_at_rest()


@BOTH
def test_output_ends_where_the_cache_ends(is_async: bool) -> None:
    harness = Harness(make_runner(is_async=is_async, num_blocks=4))
    run = harness.submit(1, [1] * 10, 1000)
    harness.run()
    assert harness.tokens[1] == undisturbed(make_submit(1, run.prompt_ids.tolist(), 6))
    assert harness.finish[1] == Finish.LENGTH
    harness.assert_at_rest()


def test_reset_drops_everything_and_keeps_the_prefix_cache() -> None:
    harness = Harness(make_runner(num_rows=2))
    for rid in range(1, 6):
        harness.submit(rid, [rid] * 9, 10)
    harness.run(until=lambda: len(harness.cached) == 2)
    harness.scheduler.pause(2)
    harness.scheduler.reset()
    harness.scheduler.check_integrity()
    assert harness.scheduler.take_ends() == []
    harness.assert_at_rest()
    harness.finish.clear()
    harness.submit(11, [1] * 9, 2)
    harness.run()
    assert harness.cached[11] == 8


def test_reset_with_a_step_in_flight_is_refused() -> None:
    harness = Harness(make_runner(is_async=True))
    harness.submit(1, [1], 5)
    harness.scheduler.plan()
    with pytest.raises(IntegrityError, match="1 steps in flight"):
        harness.scheduler.reset()


def test_a_result_of_another_step_is_refused() -> None:
    harness = Harness(make_runner())
    harness.submit(1, [1], 5)
    harness.scheduler.plan()
    with pytest.raises(IntegrityError, match="expected step 1 with 1"):
        harness.scheduler.complete(StepResult(9, np.zeros(1, np.int32), np.zeros(1, np.bool_)))


def test_a_decode_step_of_rows_with_room_asks_for_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(make_runner(block_size=16, budget=64))
    for rid in range(1, 5):
        harness.submit(rid, [rid] * 3, 10)
    harness.step()
    monkeypatch.setattr(BlockManager, "allocate", None)
    for _ in range(9):
        harness.step()
    assert len(harness.finish) == 4


@BOTH
def test_a_half_computed_prompt_that_loses_its_kv_to_a_better_one_starts_again(
    is_async: bool,
) -> None:
    """The better run leaves budget in the same step, which the loser may not spend without KV."""
    harness = Harness(make_runner(is_async=is_async, num_blocks=8, budget=16))
    low = harness.submit(1, list(range(30)), 2, priority=2)
    harness.step()
    harness.run(until=lambda: harness.scheduler.num_in_flight <= 1)
    high = harness.submit(2, [5] * 4, 3, priority=0)
    harness.run()
    assert harness.tokens[2] == undisturbed(high)
    assert harness.tokens[1] == undisturbed(low)


def test_a_paused_run_loses_its_kv_before_any_running_one() -> None:
    harness = Harness(make_runner(num_blocks=9, budget=64))
    runs = [harness.submit(rid, [rid] * 8, 16) for rid in (1, 2, 3)]
    harness.step()
    harness.scheduler.pause(1)
    harness.run(until=lambda: harness.scheduler.preemptions > 0)
    rows = harness.scheduler.rows
    assert rows.num_blocks[rows.row_of[1]] == 0, "first in the order, but paused"
    assert rows.num_blocks[rows.row_of[3]] > 0
    harness.scheduler.resume(1)
    harness.run()
    assert [harness.tokens[run.rid] for run in runs] == [undisturbed(run) for run in runs]
