"""`serve`, `broker`, `engine`: run a worker, or one of its processes alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.address import DataDir
from ops.cli.options import Config, Json, Set, with_assignments

if TYPE_CHECKING:
    from ops.models import ResolvedModel
    from ops.settings import Settings

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Directory, .gguf file, hub id or short name (default: smollm2-135m).",
    ),
]
Queue = Annotated[
    str | None, typer.Option("--queue", "-q", metavar="NAME", help="Queue (default: default).")
]
Redis = Annotated[
    str | None,
    typer.Option(
        "--redis", metavar="URL|embedded|none", help="The Redis door (default: embedded)."
    ),
]
Zmq = Annotated[
    str | None,
    typer.Option(
        "--zmq",
        metavar="ENDPOINT|none",
        help="The ZeroMQ door; port 0 takes a free one (default: tcp://127.0.0.1:5555).",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT|none",
        help="Probes and metrics; port 0 takes a free one (default: 127.0.0.1:0).",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where the model runs (default: auto)."),
]
DrainS = Annotated[
    float | None,
    typer.Option(
        "--drain-s", metavar="SECONDS", help="Time for running jobs at the end (default: 30)."
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", metavar="LEVEL", help="debug, info, warning, error (default: info)."
    ),
]
Link = Annotated[
    Path, typer.Option("--link", metavar="PATH", help="Unix socket of the two processes.")
]


def serve(
    model: Model = None,
    queue: Queue = None,
    redis: Redis = None,
    zmq: Zmq = None,
    http: Http = None,
    data_dir: DataDir = None,
    device: Device = None,
    drain_s: DrainS = None,
    log_level: LogLevel = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Start a worker: broker, engine, supervisor; and a Redis of its own if none is given.

    Prints one line with every address when it is ready. SIGTERM or Ctrl-C drains: running jobs
    finish, waiting ones stay in Redis for another worker. A second Ctrl-C does not wait.

    [dim]Examples:[/dim]
    tokenbus serve
    tokenbus serve --model ~/models/Qwen3-8B --redis redis://bus:6379/0 --queue chat --zmq none

    [dim]Exit codes:[/dim] 0 drained, 3 bad setting, 4 model unavailable, 5 address or Redis
    unavailable, 8 engine lost, 9 broker lost
    """
    from ops.cli.model import resolve_with_bar
    from ops.serve import serve as run

    flags = with_assignments(
        assignments,
        model=model,
        queue=queue,
        redis=redis,
        zmq=zmq,
        http=http,
        data_dir=data_dir,
        device=device,
        drain_s=drain_s,
        log_level=log_level,
    )
    raise SystemExit(run(_load(flags, config), resolve_with_bar, as_json=as_json))


def broker(
    link: Link,
    model: Model = None,
    queue: Queue = None,
    redis: Redis = None,
    zmq: Zmq = None,
    http: Http = None,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Run the broker process alone, without supervisor; an engine joins it over --link.

    [dim]Example:[/dim] tokenbus broker --link /run/tokenbus/link.sock --redis redis://bus:6379/0
    """
    from ops.serve import run_broker

    flags = with_assignments(assignments, model=model, queue=queue, redis=redis, zmq=zmq, http=http)
    settings = _load(flags, config)
    raise SystemExit(run_broker(settings, _resolve(settings), link))


def engine(
    link: Link,
    model: Model = None,
    device: Device = None,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """Run the engine process alone; it joins the broker at --link, and again after a loss.

    [dim]Example:[/dim] tokenbus engine --link /run/tokenbus/link.sock --model smollm2-135m
    """
    from ops.serve import run_engine

    settings = _load(with_assignments(assignments, model=model, device=device), config)
    raise SystemExit(run_engine(settings, _resolve(settings), link))


def _load(flags: dict[str, Any], config: Path | None) -> Settings:
    """Settings, with a word about variables that set nothing."""
    import os
    import sys

    from ops.settings import load, unknown_variables

    for name in unknown_variables(os.environ):
        print(f"warning: {name} is not a setting and has no effect", file=sys.stderr)
    return load(flags, config)


def _resolve(settings: Settings) -> ResolvedModel:
    from ops.cli.model import resolve_with_bar
    from ops.serve import resolve_model

    return resolve_model(settings, resolve_with_bar)
