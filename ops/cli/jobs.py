"""`submit`, `tail`, `cancel`, `status`: over Redis, for jobs that outlive a worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ops.cli.options import (
    DataDir,
    FrequencyPenalty,
    Json,
    MaxTokens,
    MinP,
    PresencePenalty,
    Prompt,
    Queue,
    Raw,
    RedisUrl,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    client_settings,
    read_prompt,
    redis_address,
    request_fields,
    sampling,
)
from ops.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from tokenbus import AsyncClient

T = TypeVar("T")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


def submit(
    prompt: Prompt,
    system: System = None,
    raw: Raw = False,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Id of the job.")] = None,
    priority: Annotated[
        str, typer.Option("--priority", metavar="high|normal|low", help="Who goes first.")
    ] = "normal",
    deadline_ms: Annotated[
        int | None, typer.Option("--deadline-ms", metavar="MS", help="End it after this long.")
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="For fair shares.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Tail it at once.")] = False,
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
    redis: RedisUrl = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Put a job into Redis and print its id; a worker will run it, now or later.

    [dim]Examples:[/dim]

    tokenbus submit "Write a haiku about rivers." --max-tokens 40

    tokenbus tail "$(tokenbus submit 'The sea is' --raw)"

    [dim]Exit codes:[/dim] 5 no Redis, 6 job refused
    """
    from ops.cli.streaming import print_stream

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
        job=job,
        deadline_ms=deadline_ms,
    )
    fields |= {"priority": priority} | ({"tenant": tenant} if tenant else {})

    async def work(client: AsyncClient) -> None:
        job = await client.submit(**fields)
        if as_json:
            print_json({"job": job})
        elif not follow:
            print(job)
        if follow:
            await print_stream(client.tail(job), as_json=as_json)

    _over_redis(redis, queue, data_dir, work)


def tail(
    job: JobId,
    from_seq: Annotated[
        int,
        typer.Option("--from-seq", metavar="SEQ", min=0, help="Last token seen; 0: everything."),
    ] = 0,
    redis: RedisUrl = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Follow a job from Redis: what is there already, then each token as it comes, to the end.

    [dim]Example:[/dim] tokenbus tail 1764441600000-0 --from-seq 10

    [dim]Exit codes:[/dim] 5 no Redis, 6 job failed, 7 no such job
    """
    from ops.cli.streaming import print_stream

    async def work(client: AsyncClient) -> None:
        await print_stream(client.tail(job, from_seq=from_seq), as_json=as_json)

    _over_redis(redis, queue, data_dir, work)


def cancel(
    job: JobId,
    redis: RedisUrl = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Ask for a job's end. It gets its terminal event from whoever runs it, or will pick it up.

    [dim]Example:[/dim] tokenbus cancel 1764441600000-0

    [dim]Exit codes:[/dim] 5 no Redis
    """
    _over_redis(redis, queue, data_dir, lambda client: client.cancel(job))
    if as_json:
        print_json({"job": job, "cancel": "requested"})
    else:
        print(f"Asked for the end of {job}; `tokenbus status {job}` shows when it is reached.")


def status(
    job: JobId,
    redis: RedisUrl = None,
    queue: Queue = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Where a job stands: queued, running, done or failed; attempt, tokens so far, worker.

    [dim]Example:[/dim] tokenbus status 1764441600000-0

    [dim]Exit codes:[/dim] 5 no Redis, 7 no such job
    """
    from dataclasses import asdict

    facts = asdict(_over_redis(redis, queue, data_dir, lambda client: client.status(job)))
    if as_json:
        print_json(facts)
    else:
        print_facts({name: value for name, value in facts.items() if value not in ("", None)})


def _over_redis(
    redis: str | None,
    queue: str | None,
    data_dir: Path | None,
    work: Callable[[AsyncClient], Coroutine[Any, Any, T]],
) -> T:
    """Do something with a client of the Redis door; what it raises ends the command."""
    from ops.cli.streaming import run_client
    from tokenbus import AsyncClient

    settings = client_settings(queue, redis, None, data_dir)
    url = redis_address(settings)

    async def run() -> T:
        async with AsyncClient(redis=url, queue=settings.queue) as client:
            return await work(client)

    return run_client(run())
