"""`submit`, `tail`, `cancel`, `status`: over Redis, for jobs that outlive a worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ops.cli.address import RedisAddress
from ops.cli.job_options import PromptOptions, SamplingOptions
from ops.cli.options import Json, with_groups
from ops.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from tokenbus import AsyncClient, JobStatus

T = TypeVar("T")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Tail it at once.")]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What the queue is to know of a job. The names are those of the job's fields."""

    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Id of the job.")] = None
    priority: Annotated[
        str, typer.Option("--priority", metavar="high|normal|low", help="Who goes first.")
    ] = "normal"
    deadline_ms: Annotated[
        int | None, typer.Option("--deadline-ms", metavar="MS", help="End it after this long.")
    ] = None
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="For fair shares.")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@with_groups
def submit(
    prompt: PromptOptions,
    options: QueueOptions,
    sampling: SamplingOptions,
    address: RedisAddress,
    follow: Follow = False,
    as_json: Json = False,
) -> None:
    """Put a job into Redis and print its id; a worker will run it, now or later.

    [dim]Examples:[/dim]
    tokenbus submit "Write a haiku about rivers." --max-tokens 40
    tokenbus tail "$(tokenbus submit 'The sea is' --raw)"

    [dim]Exit codes:[/dim] 5 no Redis, 6 job refused
    """
    from ops.cli.streaming import print_stream

    fields = prompt.fields() | options.fields() | sampling.fields()

    async def work(client: AsyncClient) -> None:
        job = await client.submit(**fields)
        if as_json:
            print_json({"job": job})
        elif not follow:
            print(job)
        if follow:
            await print_stream(client.tail(job), as_json=as_json)

    _over_redis(address, work)


@with_groups
def tail(
    job: JobId,
    address: RedisAddress,
    from_seq: Annotated[
        int,
        typer.Option("--from-seq", metavar="SEQ", min=0, help="Last token seen; 0: everything."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Follow a job from Redis: what is there already, then each token as it comes, to the end.

    [dim]Example:[/dim] tokenbus tail 1764441600000-0 --from-seq 10

    [dim]Exit codes:[/dim] 5 no Redis, 6 job failed, 7 no such job
    """
    from ops.cli.streaming import print_stream

    async def work(client: AsyncClient) -> None:
        await _known(client, job)  # a mistyped id would be waited for, for ever
        await print_stream(client.tail(job, from_seq=from_seq), as_json=as_json)

    _over_redis(address, work)


@with_groups
def cancel(job: JobId, address: RedisAddress, as_json: Json = False) -> None:
    """Ask for a job's end. It gets its terminal event from whoever runs it, or will pick it up.

    [dim]Example:[/dim] tokenbus cancel 1764441600000-0

    [dim]Exit codes:[/dim] 5 no Redis, 7 no such job
    """

    async def work(client: AsyncClient) -> JobStatus | None:
        status = await _known(client, job)
        if status is None or not status.is_over:
            await client.cancel(job)
        return status

    status = _over_redis(address, work)
    is_over = status is not None and status.is_over
    if as_json:
        print_json({"job": job, "cancel": "too_late" if is_over else "requested"})
    elif status is not None and is_over:
        print(f"{job} has ended already: {status.state}, {status.reason or status.code}.")
    else:
        print(f"Asked for the end of {job}; `tokenbus status {job}` shows when it is reached.")


@with_groups
def status(job: JobId, address: RedisAddress, as_json: Json = False) -> None:
    """Where a job stands: queued, running, done or failed; attempt, tokens so far, worker.

    [dim]Example:[/dim] tokenbus status 1764441600000-0

    [dim]Exit codes:[/dim] 5 no Redis, 7 no such job
    """
    facts = asdict(_over_redis(address, lambda client: client.status(job)))
    if as_json:
        print_json(facts)
    else:
        names = {"seq": "tokens"}  # what the number says to a person
        said = {names.get(name, name): value for name, value in facts.items()}
        print_facts({name: value for name, value in said.items() if value not in ("", None)})


async def _known(client: AsyncClient, job: str) -> JobStatus | None:
    """Where the job stands; None where this Redis does not say it. Raises UnknownJob."""
    from tokenbus.errors import BusUnavailable, TokenbusError, UnknownJob

    try:
        return await client.status(job)
    except UnknownJob:
        raise
    except BusUnavailable as error:
        if error.__cause__ is not None:  # no connection; without a cause, a long queue
            raise
        return None
    except TokenbusError:  # a user with few rights
        return None


def _over_redis(address: RedisAddress, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
    """Do something with a client of the Redis door; what it raises ends the command."""
    from ops.cli.streaming import run_client
    from tokenbus import AsyncClient

    url, queue = address.find()

    async def run() -> T:
        async with AsyncClient(redis=url, queue=queue) as client:
            return await work(client)

    return run_client(run())
