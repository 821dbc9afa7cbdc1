"""`doctor` and `keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.cli.options import Config, Json, Set, with_assignments
from ops.cli.output import print_json
from ops.exit_codes import ExitCode

Optional = str | None


def doctor(
    model: Annotated[Optional, typer.Option("--model", "-m", help="Model to look for.")] = None,
    redis: Annotated[Optional, typer.Option("--redis", help="URL, embedded or none.")] = None,
    zmq: Annotated[Optional, typer.Option("--zmq", help="Endpoint that will be bound.")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Data directory.")] = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Check everything a worker needs here, and say how to mend what is wrong.

    [dim]Example:[/dim] tokenbus doctor --redis redis://bus:6379/0

    [dim]Exit codes:[/dim] 0 nothing to mend, 10 something to mend
    """
    from dataclasses import asdict

    from ops.doctor import Level, examine
    from ops.settings import load

    flags = with_assignments(assignments, model=model, redis=redis, zmq=zmq, data_dir=data_dir)
    findings = examine(load(flags, config))
    is_sound = all(finding.level is not Level.BAD for finding in findings)
    if as_json:
        print_json({"ok": is_sound, "findings": [asdict(finding) for finding in findings]})
    else:
        from rich.console import Console

        console = Console(highlight=False)
        style = {Level.GOOD: "green", Level.NOTE: "yellow", Level.BAD: "bold red"}
        for finding in findings:
            mark = f"[{style[finding.level]}]{finding.level.value:<4}[/]"
            console.print(f"{mark} {finding.what:<8} {finding.text}", soft_wrap=True)
            if finding.remedy:
                console.print(f"              {finding.remedy}", style="dim", soft_wrap=True)
    raise SystemExit(int(ExitCode.OK if is_sound else ExitCode.CHECK_FAILED))


def keys(
    name: Annotated[str, typer.Argument(metavar="NAME", help="worker, or a client's name.")],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where to put the two files.")
    ] = Path("keys"),
    as_json: Json = False,
) -> None:
    """Make a CURVE key pair for the ZeroMQ door: NAME.public, and NAME.secret (0600).

    [dim]Example:[/dim] tokenbus keys worker && tokenbus keys alice

    [dim]Then:[/dim] serve --set gateway.secret_key_file=keys/worker.secret
    --set gateway.allow_file=FILE, where FILE has the clients' public keys, one a line.
    """
    from ops.keyfiles import generate

    pair = generate(directory, name)
    if as_json:
        files = {"public_file": str(pair.public_file), "secret_file": str(pair.secret_file)}
        print_json({**files, "public_key": pair.public_key})
    else:
        print(f"public key  {pair.public_key}\npublic file {pair.public_file}")
        print(f"secret file {pair.secret_file} (0600; never leaves this host)")
