"""`top`: the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import (
    DataDir,
    Json,
    Key,
    Queue,
    RedisUrl,
    ServerKey,
    ZmqEndpoint,
    client_settings,
    local_worker,
    redis_address,
    zmq_address,
)
from ops.cli.output import print_json

if TYPE_CHECKING:
    from pathlib import Path

    from ops.top_sources import Source


def top(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between looks.")
    ] = 1.0,
    redis: RedisUrl = None,
    zmq: ZmqEndpoint = None,
    server_key: ServerKey = None,
    key: Key = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Watch a queue and its workers: jobs, tokens a second, latency, KV cache. q quits.

    Looks through Redis at every worker of the queue; with --zmq, or where the worker on this host
    has no Redis, at one worker over ZeroMQ. --json prints one sample.

    [dim]Examples:[/dim]

    tokenbus top

    tokenbus top --redis redis://bus:6379/0 --queue chat

    tokenbus top --json --zmq tcp://127.0.0.1:5555

    [dim]Exit codes:[/dim] 5 no Redis, no worker
    """
    from rich.console import Console

    from ops.cli.streaming import client_errors
    from ops.top import run, settled, show_once

    console = Console()
    with client_errors():
        source = _source(redis, zmq, server_key, key, queue, data_dir)
        try:
            if as_json:
                sample, trend = settled(source)
                print_json(trend.facts(sample))
            elif once or not console.is_terminal:
                show_once(source, console)
            else:
                run(source, console, every)
        finally:
            source.close()


def _source(
    redis: str | None,
    zmq: str | None,
    server_key: Path | None,
    key: Path | None,
    queue: str | None,
    data_dir: Path | None,
) -> Source:
    from ops.keyfiles import client_keys
    from ops.top_sources import RedisSource, ZmqSource

    settings = client_settings(queue, redis, zmq, data_dir)
    worker = local_worker(settings)
    has_only_zmq = redis is None and worker is not None and not worker.redis
    if zmq is not None or (has_only_zmq and settings.redis_mode != "url"):
        return ZmqSource(zmq_address(settings), client_keys(server_key, key))
    return RedisSource(redis_address(settings), settings.queue)
