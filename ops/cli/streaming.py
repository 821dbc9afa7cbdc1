"""Tokens of a job as they arrive: text for people, JSON lines for programs. And client errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ops.cli.output import print_json
from ops.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from tokenbus.events import Done
    from tokenbus.stream import JobStream

T = TypeVar("T")


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn what a client raises into the end of the command, with its exit code."""
    from tokenbus.errors import BusUnavailable, TokenbusError, UnknownJob

    try:
        yield
    except BusUnavailable as error:
        remedy = (
            "Is Redis running there? `tokenbus doctor --redis URL` looks into it."
            if error.message.startswith("Redis")
            else "Is a worker running? `tokenbus doctor` checks the addresses."
        )
        raise CommandError(ExitCode.BUS_UNAVAILABLE, error.message, remedy) from error
    except UnknownJob as error:
        remedy = "Another queue (--queue)? What Redis keeps of a job ends an hour after the job."
        raise CommandError(ExitCode.NOT_FOUND, error.message, remedy) from error
    except TokenbusError as error:
        is_named = error.message.startswith(f"{error.field}:")
        where = f" (field {error.field})" if error.field and not is_named else ""
        remedy = "The same job may succeed later." if error.retry else ""
        message = f"{error.code}: {error.message}{where}"
        raise CommandError(ExitCode.JOB_FAILED, message, remedy) from error


async def print_stream(stream: JobStream, *, as_json: bool) -> str:
    """Print a job's tokens as they come; returns the whole text. Raises the job's error."""
    parts: list[str] = []
    async for tokens in stream:
        parts.append(tokens.text)
        if as_json:
            event = {"event": "tokens", "seq": tokens.seq, "ids": tokens.ids, "text": tokens.text}
            print_json({"job": stream.job, **event})
        else:
            sys.stdout.write(tokens.text)
            sys.stdout.flush()
    done = stream.done
    if as_json and done is not None:
        print_json({"job": stream.job, **done_facts(done)})
    elif not as_json:
        print()
        if done is not None and sys.stderr.isatty():
            print(f"\x1b[2m{summary(done)}\x1b[0m", file=sys.stderr)
    return "".join(parts)


def done_facts(done: Done) -> dict[str, object]:
    """A terminal event as JSON has it."""
    from tokenbus.events import usage_to_map

    usage = usage_to_map(done.usage)
    return {"event": "done", "reason": done.reason, "usage": usage, "crc": done.crc}


def summary(done: Done) -> str:
    """One line about a finished job."""
    usage = done.usage
    decode_s = (usage.total_ms - usage.queue_ms - usage.ttft_ms) / 1000
    speed = f" · {(usage.completion_tokens - 1) / decode_s:.1f} tok/s" if decode_s > 0 else ""
    return (
        f"{usage.completion_tokens} tokens, {done.reason} · "
        f"first after {usage.ttft_ms:.0f} ms{speed} · prompt {usage.prompt_tokens}"
    )


def run_client(work: Coroutine[Any, Any, T]) -> T:
    """Run a client coroutine; what it raises ends the command with a sentence."""
    with client_errors():
        return asyncio.run(work)
