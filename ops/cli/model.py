"""`tokenbus model`: what can be served, fetched ahead of time, looked into."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import Json
from ops.cli.output import print_facts, print_json, print_table

if TYPE_CHECKING:
    from ops.models import Progress, ResolvedModel

app = typer.Typer(help="Find, fetch and inspect models.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="Directory, .gguf file, hub id or short name.")
]


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A bar in bytes on stderr, from the first report on; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bars.start()  # again and again is fine
        bars.update(task, completed=done, total=total or None)

    try:
        yield report
    finally:
        bars.stop()


def resolve_with_bar(name: str) -> ResolvedModel:
    """`models.resolve` with a progress bar where there is a terminal."""
    from ops.models import resolve

    with progress_bar(f"Fetching {name}") as progress:
        return resolve(name, progress=progress)


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """Short names, and whether each is on this disk.

    [dim]Example:[/dim] tokenbus model list
    """
    from ops.models import CATALOG, is_cached

    rows = [(entry.name, entry.about, is_cached(entry)) for entry in CATALOG.values()]
    if as_json:
        print_json([dict(zip(("name", "about", "cached"), row, strict=True)) for row in rows])
        return
    shown = [(name, about, "yes" if cached else "no") for name, about, cached in rows]
    print_table(("name", "what", "here"), shown)
    print("A directory, a .gguf file or a hub id (org/name) will do as well.")


@app.command()
def fetch(name: Name, as_json: Json = False) -> None:
    """Bring a model to this disk, verified; does nothing if it is there. Prints its path.

    [dim]Example:[/dim] tokenbus model fetch smollm2-135m

    [dim]Exit codes:[/dim] 4 if it cannot be had
    """
    model = resolve_with_bar(name)
    if as_json:
        print_json({"name": model.name, "path": str(model.path)})
    else:
        print(model.path)


@app.command()
def inspect(name: Name, as_json: Json = False) -> None:
    """Architecture, size, types, context and chat template, from the metadata alone.

    [dim]Example:[/dim] tokenbus model inspect ~/models/Qwen3-8B

    [dim]Exit codes:[/dim] 4 if it cannot be had or read
    """
    from ops import model_info

    model = resolve_with_bar(name)
    info = model_info.inspect(model.path, model.name)
    if as_json:
        print_json(asdict(info))
        return
    types = ", ".join(f"{n / info.parameters:.1%} {kind}" for kind, n in info.types.items())
    print_facts(
        {
            "name": info.name,
            "path": info.path,
            "architecture": f"{info.architecture} ({info.format})",
            "parameters": f"{info.parameters / 1e6:,.1f} M: {types}",
            "size": f"{info.size_bytes / 1e6:,.1f} MB",
            "layers": f"{info.num_layers} of width {info.hidden_size}",
            "heads": f"{info.num_heads}, {info.num_kv_heads} for keys and values",
            "context": f"{info.context_tokens:,} tokens",
            "vocabulary": f"{info.vocab_size:,}",
            "chat template": "yes" if info.has_chat_template else "no",
        }
    )
