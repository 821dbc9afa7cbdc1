"""Where a client command finds its queue and its worker."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from ops.settings import Settings
    from ops.worker_files import Announcement
    from tokenbus.dealer import CurveKeys

_PANEL = "Address"

Queue = Annotated[
    str | None,
    typer.Option(
        "--queue", "-q", metavar="NAME", help="Queue (default: default).", rich_help_panel=_PANEL
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Redis door (default: of the worker on this host).",
        rich_help_panel=_PANEL,
    ),
]
ZmqEndpoint = Annotated[
    str | None,
    typer.Option(
        "--zmq",
        metavar="ENDPOINT",
        help="ZeroMQ door (default: of the worker on this host).",
        rich_help_panel=_PANEL,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Data directory of the worker (default: ~/.local/share/tokenbus).",
        rich_help_panel=_PANEL,
    ),
]
ServerKey = Annotated[
    Path | None,
    typer.Option(
        "--server-key",
        metavar="FILE",
        help="The worker's .public file, where it asks for CURVE keys.",
        rich_help_panel=_PANEL,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Your own .secret file.", rich_help_panel=_PANEL),
]


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A queue in a Redis."""

    redis: RedisUrl = None
    queue: Queue = None
    data_dir: DataDir = None

    def find(self) -> tuple[str, str]:
        """The Redis URL and the queue's name. Raises CommandError if there is no Redis."""
        settings = client_settings(self.queue, self.redis, None, self.data_dir)
        return redis_address(settings), settings.queue


@dataclass(frozen=True, slots=True)
class ZmqAddress:
    """A worker behind a ZeroMQ endpoint."""

    zmq: ZmqEndpoint = None
    server_key: ServerKey = None
    key: Key = None
    queue: Queue = None
    data_dir: DataDir = None

    def find(self) -> tuple[str, CurveKeys | None]:
        """The endpoint, and the keys to use there."""
        from ops.keyfiles import client_keys

        settings = client_settings(self.queue, None, self.zmq, self.data_dir)
        return zmq_address(settings), client_keys(self.server_key, self.key)


def client_settings(
    queue: str | None, redis: str | None, zmq: str | None, data_dir: Path | None
) -> Settings:
    """Settings of a client command."""
    from ops.settings import load

    return load({"queue": queue, "redis": redis, "zmq": zmq, "data_dir": data_dir})


def local_worker(settings: Settings) -> Announcement | None:
    """The newest worker of this queue on this host, if one is ready."""
    from ops.worker_files import find_workers

    workers = find_workers(settings.data_dir, settings.queue)
    return workers[0] if workers else None


def redis_address(settings: Settings) -> str:
    """The Redis URL: as set, else the local worker's. Raises CommandError if there is none."""
    if settings.redis_mode == "url":
        return settings.redis.get_secret_value()
    worker = local_worker(settings) if settings.redis_mode == "embedded" else None
    if worker is not None and worker.redis:
        return worker.redis
    raise CommandError(
        ExitCode.BUS_UNAVAILABLE,
        f"no Redis is set and no worker with one runs here for queue {settings.queue!r}",
        "Start `tokenbus serve`, or give --redis redis://host:6379/0.",
    )


def zmq_address(settings: Settings) -> str:
    """The ZeroMQ endpoint to use: as set, else the local worker's, else the default one.

    Raises CommandError where nobody said which and nobody listens at the default: a client would
    wait ten seconds for a worker that was never started.
    """
    if "zmq" in settings.model_fields_set and settings.zmq != "none":
        return settings.zmq
    worker = local_worker(settings)
    if worker is not None and worker.zmq:
        return worker.zmq
    if is_refused(settings.zmq):
        raise CommandError(
            ExitCode.BUS_UNAVAILABLE,
            f"no worker runs here for queue {settings.queue!r}: nobody listens at {settings.zmq}",
            "Start `tokenbus serve`, or give --zmq tcp://host:5555.",
        )
    return settings.zmq


def is_refused(endpoint: str) -> bool:
    """Whether this host says at once that nobody listens there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1.0):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # no TCP, or no word: let the client try
        return False
