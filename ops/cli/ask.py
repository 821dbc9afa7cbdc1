"""`ask` and `chat`: over ZeroMQ, for the shortest way to the worker."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from ops.cli.address import ZmqAddress
from ops.cli.job_options import PromptOptions, SamplingOptions, System, system_message
from ops.cli.options import Json, with_groups

if TYPE_CHECKING:
    from tokenbus import AsyncClient


@with_groups
def ask(
    prompt: PromptOptions, sampling: SamplingOptions, address: ZmqAddress, as_json: Json = False
) -> None:
    """Ask over ZeroMQ and watch the answer come. Ctrl-C cancels the job.

    [dim]Examples:[/dim]
    tokenbus ask "Why is the sky blue?"
    git diff | tokenbus ask - --system "Review this." --max-tokens 200 --json

    [dim]Exit codes:[/dim] 5 no worker, 6 job refused or failed, 130 interrupted
    """
    from ops.cli.streaming import run_client

    run_client(_ask(address, prompt.fields() | sampling.fields(), as_json=as_json))


async def _ask(address: ZmqAddress, fields: dict[str, Any], *, as_json: bool) -> None:
    from ops.cli.streaming import print_stream

    async with _client(address) as client, client.generate(**fields) as stream:
        await print_stream(stream, as_json=as_json)


def _client(address: ZmqAddress) -> AsyncClient:
    from tokenbus import AsyncClient

    endpoint, keys = address.find()
    return AsyncClient(zmq=endpoint, curve=keys)


@with_groups
def chat(
    sampling: SamplingOptions, address: ZmqAddress, system: System = None, as_json: Json = False
) -> None:
    """Talk over ZeroMQ, turn by turn. Ctrl-C stops an answer, Ctrl-D ends the conversation.

    [dim]Example:[/dim] tokenbus chat --system "You are a terse assistant."

    [dim]Exit codes:[/dim] 5 no worker, 6 a turn was refused or failed
    """
    from ops.cli.streaming import client_errors

    # The loop stands still while we wait for a line; libzmq keeps the connection meanwhile.
    with asyncio.Runner() as runner, client_errors():
        client = runner.run(_connect(address))
        try:
            _converse(runner, client, system_message(system), sampling.fields(), as_json=as_json)
        finally:
            runner.run(client.close())


async def _connect(address: ZmqAddress) -> AsyncClient:
    """On the loop that the client will belong to."""
    return _client(address)


def _converse(
    runner: asyncio.Runner,
    client: AsyncClient,
    history: list[dict[str, str]],
    params: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from ops.cli.streaming import print_stream

    async def turn() -> str:
        async with client.generate(messages=history, **params) as stream:
            return await print_stream(stream, as_json=as_json)

    prompt = "> " if sys.stdin.isatty() and not as_json else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            history.append({"role": "assistant", "content": runner.run(turn())})
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped)", file=sys.stderr)
