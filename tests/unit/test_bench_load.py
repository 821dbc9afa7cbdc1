"""The load of the engine benchmarks: what its recorder counts while a run goes on, and after it."""

from __future__ import annotations

import numpy as np
import pytest

from broker.ring.records import Finish, Kind, Reject, StepEvents, encode_reject, encode_step
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from ops.bench.load import Recorder, Workload, drive
from ops.bench.profile import started
from tests.unit.engine_harness import VOCAB, make_runner


def step(rids: list[int], finish: list[Finish], starts: list[int] | None = None) -> bytes:
    """A STEP record with one token for each of these runs."""
    starts = starts or []
    return encode_step(
        StepEvents(
            step_id=1,
            time_ns=1,
            rids=np.array(rids, np.uint64),
            token_ids=np.full(len(rids), 5, np.int32),
            finish=np.array(finish, np.uint8),
            started_rids=np.array(starts, np.uint64),
            cached_tokens=np.zeros(len(starts), np.int32),
        )
    )


def make_loop(is_async: bool = False) -> EngineLoop:
    runner = make_runner(is_async=is_async)
    return EngineLoop(runner, Scheduler(runner.info))


def test_tokens_are_told_apart_by_run_and_counted_as_they_come() -> None:
    recorder = Recorder()
    assert recorder.token_ns() == {}
    more, last = Finish.NOT_FINISHED, Finish.LENGTH
    recorder.try_write(Kind.STEP, step([7, 1 << 40], [more, more], starts=[7, 1 << 40]))
    assert (recorder.num_started, recorder.num_finished) == (2, 0)
    recorder.try_write(Kind.STEP, step([1 << 40, 7], [more, last]))
    assert (recorder.num_started, recorder.num_finished) == (2, 1)
    recorder.try_write(Kind.STEP, step([1 << 40], [Finish.STOP]))
    assert (recorder.num_started, recorder.num_finished) == (2, 2)
    came = recorder.token_ns()
    assert {rid: len(ns) for rid, ns in came.items()} == {7: 2, 1 << 40: 3}
    assert (came[7] == came[1 << 40][:2]).all(), "tokens of one step came at one time"
    assert (np.diff(came[1 << 40]) >= 0).all()


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.ABORTED])
def test_a_run_that_failed_raises_at_once(finish: Finish) -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match=f"run 9 ended with {finish.name}"):
        recorder.try_write(Kind.STEP, step([8, 9], [Finish.LENGTH, finish]))


def test_a_run_that_was_refused_raises_at_once() -> None:
    refusal = encode_reject(Reject(rid=1, code="too_long", field="max_tokens", message="no room"))
    with pytest.raises(RuntimeError, match="no room"):
        Recorder().try_write(Kind.REJECT, refusal)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_workload_is_timed_to_its_end(is_async: bool) -> None:
    load = Workload(num_requests=6, input_len=9, output_len=5, vocab_size=VOCAB)
    times, recorder = drive(make_loop(is_async), load)
    assert (recorder.num_started, recorder.num_finished) == (6, 6)
    assert times.num_tokens == 30
    assert [len(ns) for ns in recorder.token_ns().values()] == [5] * 6
    assert 0 < times.ttft_ms_p50 <= 1e3 * times.total_s


def test_prompts_are_skipped_until_every_run_has_its_first_token() -> None:
    load = Workload(num_requests=4, input_len=13, output_len=40, vocab_size=VOCAB)
    recorder = started(make_loop(), load)
    assert recorder.num_started == 4
    assert sorted(recorder.token_ns()) == [1, 2, 3, 4]
