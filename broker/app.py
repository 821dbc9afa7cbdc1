"""The broker process: builds the actors, runs them on one loop, stops them in order.

Order of start: engine link, text, ledger, doors; of stop: the other way round, so that the last
events reach the doors and the doors' clients. The first SIGTERM or SIGINT drains: no new jobs, the
running ones finish within drain_ms, the rest go back to the bus; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import structlog

from broker.actor import Actor, ActorSystem
from broker.config import BrokerConfig
from broker.engine_link import EngineLink
from broker.gateway.actor import GatewayActor
from broker.gateway.security import load_curve
from broker.ledger.actor import LedgerActor
from broker.link_messages import ShutdownEngine
from broker.messages import Drain
from broker.metrics import Metrics
from broker.metrics_watch import Watch, Watched
from broker.status import Monitor
from broker.streams.door import StreamsDoor
from broker.text.actor import TextActor
from broker.text.model import load_text_model
from tokenbus._version import __version__

log = structlog.get_logger("broker")

FLUSH_S = 0.2  # for the doors to send the last events, and the ring the shutdown record


@dataclass(frozen=True, slots=True)
class Broker:
    """The parts of a running broker."""

    system: ActorSystem
    link: EngineLink
    ledger: LedgerActor
    doors: tuple[Actor, ...]
    addresses: dict[str, object]


def build(config: BrokerConfig, loop: asyncio.AbstractEventLoop, monitor: Monitor) -> Broker:
    """All actors, wired. Raises what a wrong configuration raises (files, addresses, keys)."""
    curve = load_curve(config.zmq) if config.zmq else None
    model = load_text_model(config.model_path, config.fake_vocab_size)
    system = ActorSystem(loop)
    metrics = Metrics()
    watch = Watch(system, config, metrics)  # first, so that it is the last to stop
    hang_ms = config.engine_hang_ms
    link = EngineLink(system, config.link_path, config.ring_bytes, hang_ms)
    text = TextActor(system, config, model)
    ledger = LedgerActor(system, config.limits, model.vocabulary, link, metrics, hang_ms)
    addresses: dict[str, object] = {
        "worker": config.worker,
        "queue": config.queue,
        "model": config.model_name,
        "zmq": None,
        "redis": None,
        "http": watch.url,
    }
    gateway: GatewayActor | None = None
    streams: StreamsDoor | None = None
    if config.zmq is not None:
        gateway = GatewayActor(system, config, model.vocabulary, curve, text, ledger)
        addresses["zmq"] = gateway.endpoint
        metrics.add_door(gateway, "zmq")
    if config.redis is not None:
        monitor.expect("redis")
        streams = StreamsDoor(system, config, text, ledger, monitor)
        metrics.add_door(streams, "redis")
        if gateway is not None:
            gateway.connect_relay(streams)
        addresses["redis"] = without_password(config.redis.url)
    doors: list[Actor] = [door for door in (gateway, streams) if door is not None]
    for door in doors:
        ledger.add_door(door, fetches=door is streams)
    watch.look_at(Watched(ledger, monitor, gateway, streams))
    link.connect(ledger, (text, monitor))
    return Broker(system, link, ledger, tuple(doors), addresses)


async def run(config: BrokerConfig, status_fd: int | None) -> None:
    """Serve until drained. Raises ActorCrashed if an actor crashed."""
    loop = asyncio.get_running_loop()
    stop_now = asyncio.Event()
    drains: list[str] = []

    def drain(why: str) -> None:
        drains.append(why)
        monitor.is_draining = True
        log.info("broker.drain_asked", why=why)
        if len(drains) > 1 and why != "control":
            stop_now.set()
        elif len(drains) == 1:
            monitor.write("draining", {"why": why})
            for actor in (*broker.doors, broker.ledger):
                actor.tell(Drain(config.drain_ms))

    monitor = Monitor(status_fd, lambda: drain("control"))
    broker = build(config, loop, monitor)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain, number.name)
    broker.system.start()
    # The tables of the tokenizer live as long as the process: never look through them again.
    gc.collect()
    gc.freeze()
    monitor.listening(broker.addresses)
    log.info("broker.listening", version=__version__, **broker.addresses)
    await _until_over(broker, stop_now)
    monitor.is_stopping = True
    if not broker.system.crashed.done():
        broker.link.tell(ShutdownEngine())
        await asyncio.sleep(FLUSH_S)
    await broker.system.stop()
    if broker.system.crashed.done():
        raise broker.system.crashed.result()
    monitor.write("drained", {})
    log.info("worker.drained")


async def _until_over(broker: Broker, stop_now: asyncio.Event) -> None:
    """Wait for the end of a drain, a second signal, or the first crash."""
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(broker.ledger.drained.wait()),
        asyncio.ensure_future(stop_now.wait()),
    ]
    ends = [*waits, broker.system.crashed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def without_password(url: str) -> str:
    """The URL for logs and status lines."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()
