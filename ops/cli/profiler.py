"""`tokenbus profile`: a Chrome trace of engine steps."""

from __future__ import annotations

import runpy
import sys

import typer


def profile(context: typer.Context) -> None:
    """Where the time of engine steps goes: host phases and kernels on one time line.

    Arguments go to the profiler; --help shows them.

    Example:

    tokenbus profile --model qwen3-0.6b --case 8:1024:64 --steps 20 --trace trace.json
    """
    sys.argv = ["tokenbus profile", *context.args]
    runpy.run_module("ops.bench.profile", run_name="__main__")
