"""The step loop between an in-process source and sink."""

from __future__ import annotations

import gc
import resource
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from broker.ring import records
from broker.ring.records import Finish, Kind, Submit
from engine import loop as loop_module
from engine.config import EngineConfig, FakeModel
from engine.errors import LinkLost
from engine.fake_runner import build_fake_runner
from engine.loop import EngineLoop, LoopEnd
from engine.scheduler import Scheduler
from tests.unit.engine_harness import VOCAB, make_runner, make_submit, undisturbed

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "one_ahead"])


class Bus:
    """Source and sink of a test. `room`: records the sink takes before it is full."""

    def __init__(self) -> None:
        self.requests: deque[tuple[int, bytes]] = deque()
        self.written: list[tuple[int, bytes]] = []
        self.room = 1 << 60
        self.waits = 0
        self.waits_for_room = 0
        self.when_idle: deque[tuple[int, bytes]] = deque([(Kind.SHUTDOWN, b"")])
        self.lost_after_idle = False

    def read(self, max_records: int) -> list[tuple[int, bytes]]:
        taken = [self.requests.popleft() for _ in range(min(max_records, len(self.requests)))]
        if not taken and self.lost_after_idle and self.waits:
            raise LinkLost("read")
        return taken

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        if self.when_idle and not self.lost_after_idle:
            self.requests.append(self.when_idle.popleft())
        return bool(self.requests)

    def try_write(self, kind: int, payload: bytes) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.written.append((kind, payload))
        return True

    def wait_room(self, payload_bytes: int, timeout_s: float) -> None:
        self.waits_for_room += 1
        self.room = 1

    def submit(self, submit: Submit) -> Submit:
        self.requests.append((Kind.SUBMIT, records.encode_submit(submit)))
        return submit

    def steps(self) -> list[records.StepEvents]:
        return [records.decode_step(data) for kind, data in self.written if kind == Kind.STEP]

    def events(self) -> list[tuple[int, int, int]]:
        """(rid, token, finish) of all step records."""
        return [
            entry
            for step in self.steps()
            for entry in zip(
                step.rids.tolist(), step.token_ids.tolist(), step.finish.tolist(), strict=True
            )
        ]

    def tokens(self, rid: int) -> list[int]:
        return [token for r, token, _ in self.events() if r == rid and token >= 0]


def make_loop(is_async: bool = False, **sizes: int) -> EngineLoop:
    runner = make_runner(is_async=is_async, **sizes)
    return EngineLoop(runner, Scheduler(runner.info))


@BOTH
def test_a_run_goes_in_as_a_record_and_comes_out_as_one_record_a_step(is_async: bool) -> None:
    bus = Bus()
    runs = [bus.submit(make_submit(rid, [rid, 2, 3], 6)) for rid in (1, 2)]
    assert make_loop(is_async).run(bus, bus) is LoopEnd.SHUTDOWN
    assert bus.written[0][0] == Kind.READY
    ready = records.decode_json(bus.written[0][1])
    assert (ready["model"], ready["num_blocks"], ready["pid"] > 0) == ("fake", 64, True)
    for run in runs:
        assert bus.tokens(run.rid) == undisturbed(run)
    steps = bus.steps()
    assert len(steps) == 6
    assert steps[0].started_rids.tolist() == [1, 2]
    assert [step.rids.tolist() for step in steps] == [[1, 2]] * 6
    assert steps[-1].finish.tolist() == [Finish.LENGTH] * 2
    assert [step.step_id for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].batch_tokens == 6
    assert steps[-1].used_blocks == 0
    assert steps[-1].num_running == 0


def test_an_impossible_run_is_rejected_with_its_field_and_disturbs_nobody() -> None:
    bus = Bus()
    bus.submit(make_submit(1, [], 6))
    fine = bus.submit(make_submit(2, [1], 3))
    make_loop().run(bus, bus)
    rejects = [records.decode_reject(data) for kind, data in bus.written if kind == Kind.REJECT]
    assert [(reject.rid, reject.field) for reject in rejects] == [(1, "prompt_ids")]
    assert bus.tokens(2) == undisturbed(fine)


@BOTH
def test_abort_is_answered_even_when_nothing_runs(is_async: bool) -> None:
    bus = Bus()
    bus.submit(make_submit(1, [1], 6))
    bus.requests.append((Kind.PAUSE, records.encode_rids([1])))
    bus.when_idle.appendleft((Kind.ABORT, records.encode_rids([1, 99])))
    make_loop(is_async).run(bus, bus)
    assert bus.events() == [(1, -1, Finish.ABORTED)]


def test_pause_and_resume_travel_as_records() -> None:
    bus = Bus()
    run = bus.submit(make_submit(1, [1], 6))
    bus.requests.append((Kind.PAUSE, records.encode_rids([1])))
    bus.when_idle.appendleft((Kind.RESUME, records.encode_rids([1])))
    make_loop().run(bus, bus)
    assert bus.waits == 2
    assert bus.tokens(1) == undisturbed(run)


@BOTH
def test_bad_logits_end_one_run_with_error(is_async: bool) -> None:
    bus = Bus()
    bus.submit(make_submit(1, [96], 6))
    fine = bus.submit(make_submit(2, [1], 6))
    make_loop(is_async, nan_token=96).run(bus, bus)
    assert [event for event in bus.events() if event[0] == 1] == [(1, -1, Finish.ERROR)]
    assert bus.tokens(2) == undisturbed(fine)


@BOTH
def test_a_full_ring_stops_planning_and_loses_nothing(is_async: bool) -> None:
    bus = Bus()
    run = bus.submit(make_submit(1, [1, 2], 12))
    loop = make_loop(is_async)
    bus.room = 3
    for _ in range(6):
        if bus.room == 0:
            break
        loop.step(bus, bus)
    in_flight, written = loop.scheduler.num_in_flight, len(bus.steps())
    bus.room = 0
    loop.step(bus, bus)
    bus.room = 0
    for _ in range(5):
        before = bus.waits_for_room
        loop.step(bus, bus)
        assert bus.waits_for_room == before + 1, "the loop must block for room, not spin"
        bus.room = 0
    assert loop.scheduler.num_in_flight <= max(in_flight, 1)
    assert len(bus.steps()) == written
    bus.room = 1
    loop.run(bus, bus)
    assert bus.tokens(1) == undisturbed(run)


def test_an_idle_loop_blocks_and_still_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "STATS_INTERVAL_S", 0.0)
    bus = Bus()
    bus.submit(make_submit(1, [1, 2], 4))
    make_loop().run(bus, bus)
    stats = [records.decode_json(data) for kind, data in bus.written if kind == Kind.STATS]
    assert bus.waits == 1
    assert stats[-1]["steps"] == 4
    assert stats[-1]["sampled_tokens"] == 4
    assert {"intake_us", "schedule_us", "launch_us", "collect_us", "publish_us"} <= set(stats[-1])


def test_stats_come_at_most_once_a_second() -> None:
    bus = Bus()
    bus.submit(make_submit(1, [1, 2], 60))
    make_loop().run(bus, bus)
    assert sum(kind == Kind.STATS for kind, _ in bus.written) == 1


@BOTH
def test_stop_publishes_the_steps_in_flight(is_async: bool) -> None:
    bus = Bus()
    run = bus.submit(make_submit(1, [1, 2], 60))
    loop = make_loop(is_async)
    for _ in range(4):
        loop.step(bus, bus)
    launched = loop.scheduler.num_in_flight + len(bus.tokens(1))
    loop.stop()
    assert loop.run(bus, bus) is LoopEnd.STOPPED
    assert bus.tokens(1) == undisturbed(run)[:launched]


@BOTH
def test_after_a_lost_link_the_runs_are_dropped_and_a_new_one_is_served(is_async: bool) -> None:
    loop = make_loop(is_async)
    bus = Bus()
    bus.lost_after_idle = True
    bus.submit(make_submit(1, [1, 2], 60))
    bus.requests.append((Kind.PAUSE, records.encode_rids([1])))
    with pytest.raises(LinkLost):
        loop.run(bus, bus)
    loop.drop_runs()
    assert loop.scheduler.num_running == 0
    again = Bus()
    run = again.submit(make_submit(1, [1, 2], 5))
    loop.run(again, again)
    assert again.written[0][0] == Kind.READY
    assert again.tokens(1) == undisturbed(run)


def test_a_record_of_unknown_kind_is_an_error() -> None:
    bus = Bus()
    bus.requests.append((Kind.READY, b"{}"))
    with pytest.raises(records.RecordError, match="kind 16 came from the broker"):
        make_loop().run(bus, bus)


def test_memory_is_flat_over_5000_runs() -> None:
    """Submits, aborts, pauses, preemptions: neither blocks nor rows nor Python objects pile up."""
    model = FakeModel(vocab_size=VOCAB, max_model_len=128, num_blocks=32, is_async=True)
    config = EngineConfig(
        fake=model, max_num_seqs=8, max_num_batched_tokens=64, block_size_tokens=4
    )
    runner = build_fake_runner(config)
    loop = EngineLoop(runner, Scheduler(runner.info))
    rng = np.random.default_rng(3)
    bus = Bus()
    rid = 0

    def serve(count: int) -> None:
        nonlocal rid
        for _ in range(count // 10):
            for _ in range(10):
                rid += 1
                prompt = rng.integers(0, 90, int(rng.integers(1, 30))).tolist()
                bus.submit(make_submit(rid, prompt, int(rng.integers(1, 12))))
            bus.requests.append((Kind.PAUSE, records.encode_rids([rid - 1])))
            bus.requests.append((Kind.ABORT, records.encode_rids([rid - 1, rid])))
            while loop.step(bus, bus):
                bus.written.clear()
        bus.written.clear()
        loop.scheduler.check_integrity()

    def footprint() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return sys.getallocatedblocks(), pages * resource.getpagesize()

    serve(1000)
    objects, rss_bytes = footprint()
    serve(4000)
    objects_after, rss_bytes_after = footprint()
    assert rid == 5000
    assert loop.scheduler.blocks.num_used == 0
    assert loop.scheduler.num_running == loop.scheduler.num_waiting == 0
    assert objects_after - objects < 1000, "fewer objects more than a quarter of the runs"
    assert rss_bytes_after - rss_bytes < 4 << 20
