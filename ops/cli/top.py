"""`top`: the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.address import (
    RedisUrl,
    ZmqAddress,
    client_settings,
    local_worker,
    redis_address,
)
from ops.cli.options import Json, with_groups
from ops.cli.output import print_json

if TYPE_CHECKING:
    from ops.top_sources import Source


@with_groups
def top(
    address: ZmqAddress,
    redis: RedisUrl = None,
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between looks.")
    ] = 1.0,
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
        source = _source(address, redis)
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


def _source(address: ZmqAddress, redis: str | None) -> Source:
    from ops.top_sources import RedisSource, ZmqSource

    settings = client_settings(address.queue, redis, address.zmq, address.data_dir)
    worker = local_worker(settings)
    has_only_zmq = redis is None and worker is not None and not worker.redis
    if address.zmq is not None or (has_only_zmq and settings.redis_mode != "url"):
        return ZmqSource(*address.find())
    return RedisSource(redis_address(settings), settings.queue)
