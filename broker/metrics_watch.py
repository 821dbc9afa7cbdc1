"""The watch: an actor that looks at the others once a second, and the pages that say what it saw.

`/live`: the event loop turned lately. `/ready`: the worker takes jobs; 503 with the reason where it
does not. `/metrics`: everything counted. The pages run in the HTTP server's threads and read only
what is replaced as a whole or counts by itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from http import HTTPStatus

from broker.actor import Actor, ActorSystem
from broker.config import BrokerConfig
from broker.gateway.actor import GatewayActor
from broker.http_server import HttpServer, Page
from broker.ledger.actor import LedgerActor
from broker.metrics import Metrics
from broker.metrics_export import CONTENT_TYPE, Exporter
from broker.queue import PRIORITIES
from broker.status import Monitor
from broker.streams.door import StreamsDoor
from tokenbus._version import __version__

PERIOD_S = 0.5
DEAD_S = 5.0  # a loop that has not turned for so long is not live


@dataclass(frozen=True, slots=True)
class Watched:
    """Whom to look at."""

    ledger: LedgerActor
    monitor: Monitor
    gateway: GatewayActor | None = None
    streams: StreamsDoor | None = None


class Watch(Actor):
    """Binds the HTTP address at once. Raises OSError if it cannot be had."""

    def __init__(self, system: ActorSystem, config: BrokerConfig, metrics: Metrics) -> None:
        super().__init__(system, "watch")
        self._metrics = metrics
        self._exporter = Exporter(metrics)
        self._watched: Watched | None = None
        self._turned_s = time.monotonic()
        self._server: HttpServer | None = None
        if config.http:
            pages = {"/live": self.live, "/ready": self.ready, "/metrics": self.metrics_page}
            self._server = HttpServer(config.http, pages)
        about = (__version__, config.model_name, config.queue, config.worker)
        metrics.set("build_info", 1, about)
        metrics.set("start_time_seconds", time.time())

    @property
    def url(self) -> str | None:
        """Where the pages are; None: nowhere."""
        return self._server.url if self._server else None

    def look_at(self, watched: Watched) -> None:
        """Call before `start`."""
        self._watched = watched

    def start(self) -> None:
        """Look, and serve."""
        self._look()
        self.later(PERIOD_S, self._turn)
        if self._server is not None:
            self._server.start()

    def handle(self, message: object) -> None:
        """Nobody has anything to tell it: it looks by itself."""
        raise TypeError(f"{self.name} takes no messages, got {type(message).__name__}")

    async def stop(self) -> None:
        """Close the server, off the loop: it takes a moment."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    # ------------------------------------------------------------ pages, in the server's threads

    def live(self) -> Page:
        """200 while the loop turns."""
        silent_s = time.monotonic() - self._turned_s
        is_live = silent_s < DEAD_S
        return _json_page(is_live, {"live": is_live, "silent_s": round(silent_s, 3)})

    def ready(self) -> Page:
        """200 while the worker takes jobs."""
        reason = self._reason()
        silent_s = time.monotonic() - self._turned_s
        if silent_s >= DEAD_S:
            reason = f"broker: its event loop has not turned for {silent_s:.1f} s"
        return _json_page(not reason, {"ready": not reason, "reason": reason})

    def metrics_page(self) -> Page:
        """Prometheus' text format."""
        return Page(HTTPStatus.OK, CONTENT_TYPE, self._exporter.render())

    def _reason(self) -> str:
        return self._watched.monitor.reason if self._watched else "broker: is starting"

    # ------------------------------------------------------------ on the loop

    def _turn(self) -> None:
        now_s = time.monotonic()
        self._metrics.set("loop_lag_seconds", max(0.0, now_s - self._turned_s - PERIOD_S))
        self._turned_s = now_s
        self._look()
        self.later(PERIOD_S, self._turn)

    def _look(self) -> None:
        put, watched = self._metrics.set, self._watched
        for actor, length in self.system.mailbox_lengths().items():
            put("mailbox_messages", length, (actor,))
        if watched is None:
            return
        put("ready", not watched.monitor.reason)
        put("draining", watched.monitor.is_draining)
        self._look_at_ledger(watched.ledger)
        if watched.gateway is not None:
            self._look_at_gateway(watched.gateway)
        if watched.streams is not None:
            self._look_at_streams(watched.streams)

    def _look_at_ledger(self, ledger: LedgerActor) -> None:
        put, book = self._metrics.set, ledger.book
        waiting = len(book.queue)
        for priority, count in zip(PRIORITIES, book.queue.lengths(), strict=True):
            put("queue_jobs", count, (priority,))
        put("queue_oldest_seconds", book.oldest_wait_s())
        running, suspects = len(book.runs.by_rid), len(book.trials.waiting())
        put("running_jobs", running)
        put("suspect_jobs", suspects)
        put("paused_jobs", max(0, len(book.jobs) - waiting - running - suspects))

    def _look_at_gateway(self, gateway: GatewayActor) -> None:
        put, counts = self._metrics.set, gateway.counts()
        put("zmq_clients", counts.num_clients)
        put("zmq_muted_peers", counts.num_muted)
        put("zmq_streams", counts.num_streams)
        put("zmq_events_total", counts.num_events)
        put("zmq_messages_total", counts.num_messages)
        for code, count in counts.refused.items():
            put("refused_total", count, ("zmq", code))

    def _look_at_streams(self, streams: StreamsDoor) -> None:
        put, counters, backlog = self._metrics.set, streams.counters, streams.backlog
        put("redis_up", streams.is_ready)
        put("redis_reconnects_total", counters.reconnects)
        put("dead_letters_total", counters.dead)
        put("takeovers_total", counters.taken_over)
        put("fences_lost_total", counters.fenced)
        put("released_total", counters.released)
        put("replies_restored_total", counters.restored)
        put("duplicates_total", counters.duplicates)
        for code, count in counters.refused.items():
            put("refused_total", count, ("redis", code))
        if backlog is None:
            for name in ("dead_letter_entries", "backlog_oldest_seconds", "backlog_jobs"):
                self._metrics.clear(name)
        else:
            put("dead_letter_entries", backlog.dead)
            put("backlog_oldest_seconds", backlog.oldest_s)
            for priority, count in backlog.waiting.items():
                put("backlog_jobs", count, (priority,))


def _json_page(is_good: bool, body: dict[str, object]) -> Page:
    status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, "application/json", json.dumps(body).encode() + b"\n")
