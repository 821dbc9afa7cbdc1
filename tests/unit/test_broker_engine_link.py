"""The engine link actor over real rings, with the engine's end played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker import engine_link, spin
from broker.actor import ActorSystem
from broker.engine_link import EngineLink
from broker.link_messages import (
    AbortRuns,
    EngineGone,
    EngineProgress,
    EngineStats,
    EngineUp,
    PauseRuns,
    ResumeRuns,
    RingState,
    RunRejected,
    ShutdownEngine,
    StartRun,
    Steps,
)
from broker.ring import link as ring_link
from broker.ring.records import (
    Kind,
    Reject,
    StepEvents,
    Submit,
    decode_rids,
    decode_submit,
    encode_json,
    encode_reject,
    encode_step,
)
from broker.ring.spin import SpinGauge
from broker.spin import LoopSpin

READY = {
    "vocab_size": 100, "max_model_len": 500, "num_blocks": 20, "block_size": 16,
    "max_num_seqs": 8, "eos_token_ids": [2], "pid": 123,
}  # fmt: skip


class Inbox:
    """What was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._arrived = asyncio.Event()

    def tell(self, message: object) -> bool:
        self.messages.append(message)
        self._arrived.set()
        return True

    async def until(self, is_there: Callable[[list[Any]], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_there(self.messages):
                self._arrived.clear()
                await self._arrived.wait()

    def kinds(self) -> list[type]:
        return [type(message) for message in self.messages]


class Setup:
    """The actor, and one connected engine's end."""

    def __init__(
        self, path: Path, gauge: SpinGauge | None = None, ring_bytes: int = 1 << 16
    ) -> None:
        self.path = str(path / "link" / "engine.sock")
        self.system = ActorSystem(asyncio.get_running_loop())
        self.system.spin = LoopSpin(self.system.loop, gauge)
        self.actor = EngineLink(self.system, self.path, ring_bytes, hang_ms=60_000)
        self.ledger, self.text = Inbox(), Inbox()
        self.actor.connect(self.ledger, (self.text,))
        self.system.start()

    async def engine(self) -> ring_link.EngineLink:
        return await asyncio.to_thread(ring_link.connect_engine, self.path, 5.0)

    async def drain(self, engine: ring_link.EngineLink, count: int) -> list[tuple[int, bytes]]:
        """The next records that the broker wrote."""
        records: list[tuple[int, bytes]] = []
        async with asyncio.timeout(10):
            while len(records) < count:
                records += engine.requests.read_batch(count - len(records))
                await asyncio.sleep(0.001)
        return records


def run(rid: int, num_tokens: int = 5) -> Submit:
    none = np.array([], np.int32)
    return Submit(rid, np.arange(num_tokens, dtype=np.int32), none, none, 10)


def step(number: int) -> bytes:
    none = np.array([], np.int32)
    return encode_step(
        StepEvents(
            number, 0, np.array([1], np.uint64), np.array([number], np.int32),
            np.array([0], np.uint8), np.array([], np.uint64), none,
        )
    )  # fmt: skip


async def test_records_of_every_kind_reach_whom_they_concern(tmp_path: Path) -> None:
    s = Setup(tmp_path)
    engine = await s.engine()
    for kind, payload in (
        (Kind.PROGRESS, encode_json({"done": 1})),
        (Kind.READY, encode_json(READY)),
        (Kind.STEP, step(1)),
        (Kind.STEP, step(2)),
        (Kind.REJECT, encode_reject(Reject(7, "too_long", "prompt_ids", "no"))),
        (Kind.STATS, encode_json({"steps": 2})),
    ):
        assert engine.events.try_write(kind, payload)
    await s.ledger.until(lambda m: EngineStats in map(type, m))
    steps = [e for m in s.ledger.messages if isinstance(m, Steps) for e in m.steps]
    assert [e.step_id for e in steps] == [1, 2]
    order = [k for k in s.ledger.kinds() if k is not Steps]
    assert order == [EngineProgress, EngineUp, RunRejected, EngineStats]
    assert s.text.kinds() == [EngineProgress, EngineUp]
    up = s.text.messages[1]
    assert (up.max_model_len, up.eos_token_ids, up.pid) == (320, (2,), 123)  # the cache is shorter
    engine.close()
    await s.system.stop()


async def test_a_loop_that_is_awake_sees_records_for_which_no_bell_rings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "POLL_S", 60.0)  # no second look
    monkeypatch.setattr(spin, "CROWDED_S", 60.0)  # nor a rest on a full machine
    s = Setup(tmp_path, SpinGauge(spin_s=60.0, num_cores=2))
    engine = await s.engine()
    for number in range(1, 100):
        assert engine.events.try_write(Kind.STEP, step(number))
        await s.ledger.until(lambda m, n=number: bool(m) and m[-1].steps[-1].step_id == n)  # type: ignore[misc]
    engine.close()
    await s.system.stop()


async def test_a_loop_that_rests_again_is_woken_by_the_bell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "POLL_S", 60.0)  # no second look
    s = Setup(tmp_path, SpinGauge(spin_s=2e-3, num_cores=2))
    engine = await s.engine()
    for number in range(1, 30):
        assert engine.events.try_write(Kind.STEP, step(number))
        await s.ledger.until(lambda m, n=number: bool(m) and m[-1].steps[-1].step_id == n)  # type: ignore[misc]
        async with asyncio.timeout(10):
            while number % 10 == 0 and s.system.spin.is_awake:
                await asyncio.sleep(1e-3)
    engine.close()
    await s.system.stop()


async def test_what_the_ledger_asks_is_written_in_order(tmp_path: Path) -> None:
    s = Setup(tmp_path)
    engine = await s.engine()
    engine.events.try_write(Kind.READY, encode_json(READY))
    await s.ledger.until(lambda m: len(m) == 1)
    s.actor.tell(StartRun(run(1)))
    s.actor.tell(PauseRuns((1,)))
    s.actor.tell(ResumeRuns((1,)))
    s.actor.tell(AbortRuns((1, 2)))
    s.actor.tell(ShutdownEngine())
    records = await s.drain(engine, 5)
    kinds = [Kind.SUBMIT, Kind.PAUSE, Kind.RESUME, Kind.ABORT, Kind.SHUTDOWN]
    assert [kind for kind, _ in records] == kinds
    assert decode_submit(records[0][1]).rid == 1
    assert decode_rids(records[3][1]) == [1, 2]
    engine.close()
    await s.system.stop()


async def test_a_full_ring_holds_records_back_in_order_and_says_so(tmp_path: Path) -> None:
    s = Setup(tmp_path, ring_bytes=1 << 12)
    engine = await s.engine()
    engine.events.try_write(Kind.READY, encode_json(READY))
    await s.ledger.until(lambda m: len(m) == 1)
    for rid in range(1, 41):
        s.actor.tell(StartRun(run(rid, 60)))
    await s.ledger.until(lambda m: RingState(is_full=True) in m)
    records = await s.drain(engine, 40)
    assert [decode_submit(payload).rid for _, payload in records] == list(range(1, 41))
    await s.ledger.until(lambda m: m[-1] == RingState(is_full=False))
    s.actor.tell(AbortRuns((40,)))
    assert (await s.drain(engine, 1))[0][0] == Kind.ABORT
    engine.close()
    await s.system.stop()


async def test_a_run_larger_than_the_ring_is_rejected_by_name(tmp_path: Path) -> None:
    s = Setup(tmp_path, ring_bytes=1 << 12)
    engine = await s.engine()
    engine.events.try_write(Kind.READY, encode_json(READY))
    await s.ledger.until(lambda m: len(m) == 1)
    s.actor.tell(StartRun(run(9, 5_000)))
    await s.ledger.until(lambda m: len(m) == 2)
    reject = s.ledger.messages[1].reject
    assert (reject.rid, reject.code, reject.field) == (9, "too_long", "prompt_ids")
    engine.close()
    await s.system.stop()


async def test_what_a_dead_engine_had_published_comes_before_the_news_of_its_death(
    tmp_path: Path,
) -> None:
    s = Setup(tmp_path)
    engine = await s.engine()
    engine.events.try_write(Kind.READY, encode_json(READY))
    for number in range(200):
        engine.events.try_write(Kind.STEP, step(number))
    engine.close()
    await s.ledger.until(lambda m: EngineGone in map(type, m))
    steps = [e.step_id for m in s.ledger.messages if isinstance(m, Steps) for e in m.steps]
    assert steps == list(range(200))
    assert isinstance(s.ledger.messages[-1], EngineGone)
    assert isinstance(s.text.messages[-1], EngineGone)
    s.actor.tell(StartRun(run(1)))  # into the void: the ledger starts it again
    second = await s.engine()
    second.events.try_write(Kind.READY, encode_json(READY))
    await s.ledger.until(lambda m: isinstance(m[-1], EngineUp))
    assert second.requests.read() is None
    second.close()
    await s.system.stop()


async def test_a_second_engine_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    s = Setup(tmp_path)
    first = await s.engine()
    first.events.try_write(Kind.READY, encode_json(READY))
    await s.ledger.until(lambda m: len(m) == 1)
    second = await s.engine()
    async with asyncio.timeout(10):
        while not second.is_peer_gone():
            await asyncio.sleep(0.001)
    first.events.try_write(Kind.STEP, step(1))
    await s.ledger.until(lambda m: len(m) == 2)
    assert s.ledger.kinds() == [EngineUp, Steps]
    first.close()
    second.close()
    await s.system.stop()
