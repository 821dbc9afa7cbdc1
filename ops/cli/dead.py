"""`tokenbus dead`: the jobs that were given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.address import RedisAddress
from ops.cli.options import Json, with_groups
from ops.cli.output import print_facts, print_json, print_table
from ops.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from redis import Redis

app = typer.Typer(
    help="Jobs that were given up: look at them, send them again.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the entry or of the job.")]


@contextmanager
def _redis(address: RedisAddress) -> Iterator[tuple[Redis, str]]:
    """A connection and the queue's name; a lost connection ends the command with a sentence."""
    from redis import Redis, RedisError

    url, queue = address.find()
    try:
        with Redis.from_url(url, socket_timeout=10) as connection:
            yield connection, queue
    except RedisError as error:
        raise CommandError(
            ExitCode.BUS_UNAVAILABLE, f"Redis: {error}", "`tokenbus doctor` looks into it."
        ) from error


@app.command("list")
@with_groups
def list_dead(
    address: RedisAddress,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many.")] = 20,
    as_json: Json = False,
) -> None:
    """The newest dead jobs and why each was given up.

    [dim]Example:[/dim] tokenbus dead list --limit 5
    """
    from ops.dead_letters import newest

    with _redis(address) as (connection, name):
        letters = newest(connection, name, limit)
    if as_json:
        print_json([letter.facts() for letter in letters])
    elif not letters:
        print(f"No dead jobs in queue {name}.")
    else:
        columns = ("entry", "job", "code", "reason", "attempts")
        rows = [[letter.facts()[column] for column in columns] for letter in letters]
        print_table(columns, rows)


@app.command()
@with_groups
def show(id_: Id, address: RedisAddress, as_json: Json = False) -> None:
    """One dead job with its whole request.

    [dim]Example:[/dim] tokenbus dead show 1764441600000-0

    [dim]Exit codes:[/dim] 7 if there is no such dead job
    """
    from ops.dead_letters import find

    with _redis(address) as (connection, name):
        letter = find(connection, name, id_)
    request = letter.readable_request()
    if as_json:
        print_json({**letter.facts(), "request": request})
    else:
        print_facts({**letter.facts(), **{f"request {k}": v for k, v in request.items()}})


@app.command()
@with_groups
def requeue(id_: Id, address: RedisAddress, as_json: Json = False) -> None:
    """Send a dead job again, under a new id that is printed.

    [dim]Example:[/dim] tokenbus tail "$(tokenbus dead requeue 1764441600000-0)"

    [dim]Exit codes:[/dim] 7 if there is no such dead job
    """
    from ops.dead_letters import find
    from ops.dead_letters import requeue as send_again

    with _redis(address) as (connection, name):
        job = send_again(connection, name, find(connection, name, id_))
    if as_json:
        print_json({"job": job})
    else:
        print(job)
