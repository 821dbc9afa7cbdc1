"""All commands, in groups."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli import ask, bench, dead, jobs, model, profiler, service, tools, top
from ops.exit_codes import MEANINGS

_CODES = "\n".join(f"{int(code):>3}: {meaning}" for code, meaning in MEANINGS.items())

app = typer.Typer(
    name="tokenbus",
    help="LLM inference on your message bus: jobs in from Redis streams or ZeroMQ, tokens out.",
    epilog=f"Exit codes:\n\n{_CODES}",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

SERVICE, JOBS, MODELS, CARE = "Run a worker", "Send jobs", "Models", "Look after it"

app.command(rich_help_panel=SERVICE)(service.serve)
app.command(rich_help_panel=SERVICE)(service.broker)
app.command(rich_help_panel=SERVICE)(service.engine)
app.command(rich_help_panel=JOBS)(ask.ask)
app.command(rich_help_panel=JOBS)(ask.chat)
app.command(rich_help_panel=JOBS)(jobs.submit)
app.command(rich_help_panel=JOBS)(jobs.tail)
app.command(rich_help_panel=JOBS)(jobs.cancel)
app.command(rich_help_panel=JOBS)(jobs.status)
app.add_typer(dead.app, name="dead", rich_help_panel=JOBS)
app.add_typer(model.app, name="model", rich_help_panel=MODELS)
app.command(rich_help_panel=CARE)(top.top)
app.command(rich_help_panel=CARE)(tools.doctor)
app.command(rich_help_panel=CARE)(tools.keys)
app.command(
    rich_help_panel=CARE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(profiler.profile)
app.add_typer(bench.app, name="bench", rich_help_panel=CARE)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tokenbus import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """LLM inference on your message bus: jobs in from Redis streams or ZeroMQ, tokens out."""
