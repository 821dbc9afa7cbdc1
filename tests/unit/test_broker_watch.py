"""The watch: what the probes say while the loop turns, and while it does not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest

from broker import metrics_watch
from broker.actor import ActorSystem
from broker.config import BrokerConfig, QueueConfig
from broker.http_server import Page
from broker.ledger.actor import LedgerActor
from broker.link_messages import EngineGone, EngineUp
from broker.messages import DoorStatus
from broker.metrics import Metrics
from broker.metrics_watch import Watch, Watched
from broker.queue import FairQueue, Ticket
from broker.status import Monitor
from broker.text.vocabulary import Vocabulary
from tests.unit.test_broker_ledger import VOCABULARY

CONFIG = BrokerConfig(
    worker="w", queue="q", model_path="", model_name="m", link_path="", http="127.0.0.1:0"
)
UP = EngineUp(512, 4096, 8, (), 1, {})


class NoLink:
    def tell(self, message: object) -> bool:
        return True


@pytest.fixture
async def parts() -> AsyncIterator[tuple[Watch, Monitor, Metrics]]:
    vocabulary: Vocabulary = VOCABULARY
    system = ActorSystem(asyncio.get_running_loop())
    metrics, monitor = Metrics(), Monitor(None, lambda: None)
    watch = Watch(system, CONFIG, metrics)
    ledger = LedgerActor(system, QueueConfig(), vocabulary, NoLink(), metrics)
    watch.look_at(Watched(ledger, monitor))
    system.start()
    yield watch, monitor, metrics
    await system.stop()


def said(page: Page) -> tuple[int, str]:
    body = json.loads(page.body)
    return page.status, body.get("reason", "")


async def test_ready_follows_engine_and_doors(parts: tuple[Watch, Monitor, Metrics]) -> None:
    watch, monitor, _ = parts
    monitor.expect("redis")
    assert said(watch.ready()) == (503, "engine: the engine is loading; redis: is starting")
    monitor.tell(UP)
    assert said(watch.ready()) == (503, "redis: is starting")
    monitor.tell(DoorStatus("redis", True))
    assert said(watch.ready()) == (200, "")
    monitor.tell(EngineGone(1))
    assert said(watch.ready()) == (503, "engine: the engine is gone")
    monitor.tell(UP)
    monitor.is_draining = True
    assert said(watch.ready()) == (503, "broker: is draining")


async def test_a_loop_that_stands_still_is_neither_live_nor_ready(
    parts: tuple[Watch, Monitor, Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, monitor, metrics = parts
    monitor.tell(UP)
    monkeypatch.setattr(metrics_watch, "DEAD_S", 0.3)
    monkeypatch.setattr(metrics_watch, "PERIOD_S", 0.02)
    await turned(lambda: metrics.get("ready") == 1)
    assert watch.live().status == 200
    time.sleep(0.4)
    assert watch.live().status == 503
    assert "has not turned" in said(watch.ready())[1]
    await turned(lambda: watch.live().status == 200)
    assert metrics.get("loop_lag_seconds") >= 0


async def turned(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_queue_knows_its_lengths_and_its_oldest() -> None:
    queue = FairQueue(QueueConfig())
    tickets = [Ticket(f"job-{i}", "t", i % 3, 10) for i in range(5)]
    for ticket in tickets:
        queue.admit(ticket)
    assert queue.lengths() == [2, 2, 1]
    assert queue.oldest() == [tickets[0]]
    queue.remove("job-0")
    assert queue.lengths() == [1, 2, 1]
    queue.requeue(tickets[0])
    assert queue.oldest() == [tickets[1], tickets[0]]
    while queue.pop() is not None:
        pass
    assert queue.lengths() == [0, 0, 0]
    assert queue.oldest() == []
