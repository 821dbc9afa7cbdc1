"""Options that several commands share, and the way from flags to settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from ops.settings import Settings
    from ops.worker_files import Announcement

ADDRESS = "Address"
SAMPLING = "Sampling"

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue", metavar="NAME", help="Queue (default: default).", rich_help_panel=ADDRESS
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Redis door (default: of the worker on this host).",
        rich_help_panel=ADDRESS,
    ),
]
ZmqEndpoint = Annotated[
    str | None,
    typer.Option(
        "--zmq",
        metavar="ENDPOINT",
        help="ZeroMQ door (default: of the worker on this host).",
        rich_help_panel=ADDRESS,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Data directory of the worker (default: ~/.local/share/tokenbus).",
        rich_help_panel=ADDRESS,
    ),
]
ServerKey = Annotated[
    Path | None,
    typer.Option(
        "--server-key",
        metavar="FILE",
        help="The worker's .public file, where it asks for CURVE keys.",
        rich_help_panel=ADDRESS,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Your own .secret file.", rich_help_panel=ADDRESS),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file (default: ./tokenbus.toml if it is there)."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting, such as engine.max_num_seqs=8."
    ),
]


def nested(assignments: list[str] | None) -> dict[str, Any]:
    """`["engine.max_num_seqs=8"]` -> `{"engine": {"max_num_seqs": "8"}}`."""
    tree: dict[str, Any] = {}
    for text in assignments or []:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise CommandError(
                ExitCode.USAGE,
                f"--set {text!r} is not KEY=VALUE",
                "Write --set engine.dtype=float32.",
            )
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return tree


def with_assignments(assignments: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The flags that were given, over what --set says."""
    return nested(assignments) | {key: value for key, value in flags.items() if value is not None}


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
    """The ZeroMQ endpoint to use: as set, else the local worker's, else the default one."""
    if "zmq" in settings.model_fields_set and settings.zmq != "none":
        return settings.zmq
    worker = local_worker(settings)
    if worker is not None and worker.zmq:
        return worker.zmq
    return settings.zmq


# ---------------------------------------------------------------- what a job is made of

Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="What to say; `-` reads standard input.")
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="System message.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", metavar="TOKENS", rich_help_panel=SAMPLING, help="Longest answer."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="T", rich_help_panel=SAMPLING, help="0 is greedy."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", rich_help_panel=SAMPLING, help="Smallest set with mass P."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", rich_help_panel=SAMPLING, help="The K likeliest tokens."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", rich_help_panel=SAMPLING, help="At least P of the best."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        rich_help_panel=SAMPLING,
        help="Over 1: less of what prompt and answer have.",
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty",
        metavar="P",
        rich_help_panel=SAMPLING,
        help="Over 0: less of what the answer has.",
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        metavar="F",
        rich_help_panel=SAMPLING,
        help="Over 0: the less, the more often the answer has it.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", rich_help_panel=SAMPLING, help="Same seed, same tokens."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", rich_help_panel=SAMPLING, help="Ends the answer; repeatable."
    ),
]


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`."""
    if prompt != "-":
        return prompt
    import sys

    return sys.stdin.read()


def sampling(**values: object) -> dict[str, Any]:
    """The sampling fields that were given."""
    given = {name: value for name, value in values.items() if value is not None}
    stop = given.pop("stop", None)
    return given | ({"stop": stop} if stop else {})


def request_fields(prompt: str, system: str | None, *, raw: bool) -> dict[str, Any]:
    """`prompt` for a plain continuation, else `messages`."""
    if raw and system is None:
        return {"prompt": prompt}
    if raw:
        raise typer.BadParameter("a plain continuation has no system message", param_hint="--raw")
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": prompt}]}
