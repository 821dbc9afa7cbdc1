"""`tokenbus bench`: the measurements that docs/PERFORMANCE.md quotes. Each prints JSON last."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

import typer

app = typer.Typer(
    help="Measure this machine. Extra arguments go to the benchmark; --help shows its own.",
    no_args_is_help=True,
)

_ABOUT = {
    "ring": "The shared-memory ring between two processes, beside ZeroMQ ipc and a queue.",
    "bus": "Jobs and token events per second through both doors, with a fake model.",
    "engine": "Tokens per second of the engine, alone and in a batch.",
    "kernels": "Each kernel beside its torch reference.",
    "engine_cpu": "The CPU engine beside transformers and llama.cpp on the same weights.",
    "scheduler": "Host work per step.",
    "chaos": "Kill processes under load and count what was lost or repeated.",
}


def _add(name: str, about: str) -> None:
    @app.command(
        name,
        help=about,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        # Each is a script of its own as well, with its own arguments.
        sys.argv = [f"tokenbus bench {name}", *context.args]
        runpy.run_module(f"ops.bench.{name}", run_name="__main__")


for _name, _text in _ABOUT.items():
    if find_spec(f"ops.bench.{_name}") is not None:
        _add(_name, _text)
