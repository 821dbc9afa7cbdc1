"""`ask` and `chat`: over ZeroMQ, for the shortest way to the worker."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.cli.options import (
    DataDir,
    FrequencyPenalty,
    Json,
    Key,
    MaxTokens,
    MinP,
    PresencePenalty,
    Prompt,
    Queue,
    Raw,
    RepetitionPenalty,
    Seed,
    ServerKey,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    ZmqEndpoint,
    client_settings,
    read_prompt,
    request_fields,
    sampling,
    zmq_address,
)

if TYPE_CHECKING:
    from tokenbus import AsyncClient


def ask(
    prompt: Prompt,
    system: System = None,
    raw: Raw = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    zmq: ZmqEndpoint = None,
    server_key: ServerKey = None,
    key: Key = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Ask over ZeroMQ and watch the answer come. Ctrl-C cancels the job.

    [dim]Examples:[/dim]

    tokenbus ask "Why is the sky blue?"

    git diff | tokenbus ask - --system "Review this." --max-tokens 200 --json

    [dim]Exit codes:[/dim] 5 no worker, 6 job refused or failed, 130 interrupted
    """
    from ops.cli.streaming import run_client

    fields = request_fields(read_prompt(prompt), system, raw=raw) | sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
    )
    endpoint = zmq_address(client_settings(queue, None, zmq, data_dir))
    run_client(_ask(endpoint, server_key, key, fields, as_json=as_json))


async def _ask(
    endpoint: str,
    server_key: Path | None,
    key: Path | None,
    fields: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from ops.cli.streaming import print_stream

    async with (
        await _connect(endpoint, server_key, key) as client,
        client.generate(**fields) as stream,
    ):
        await print_stream(stream, as_json=as_json)


async def _connect(endpoint: str, server_key: Path | None, key: Path | None) -> AsyncClient:
    from ops.keyfiles import client_keys
    from tokenbus import AsyncClient

    return AsyncClient(zmq=endpoint, curve=client_keys(server_key, key))


def chat(
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    zmq: ZmqEndpoint = None,
    server_key: ServerKey = None,
    key: Key = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Talk over ZeroMQ, turn by turn. Ctrl-C stops an answer, Ctrl-D ends the conversation.

    [dim]Example:[/dim] tokenbus chat --system "You are a terse assistant."

    [dim]Exit codes:[/dim] 5 no worker, 6 a turn was refused or failed
    """
    from ops.cli.streaming import client_errors

    params = sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    endpoint = zmq_address(client_settings(queue, None, zmq, data_dir))
    history = [{"role": "system", "content": system}] if system else []
    # The loop stands still while we wait for a line; libzmq keeps the connection meanwhile.
    with asyncio.Runner() as runner, client_errors():
        client = runner.run(_connect(endpoint, server_key, key))
        try:
            _converse(runner, client, history, params, as_json=as_json)
        finally:
            runner.run(client.close())


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
            return
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            history.append({"role": "assistant", "content": runner.run(turn())})
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped)", file=sys.stderr)
