"""`doctor` and `keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.cli.address import DataDir
from ops.cli.options import Config, Json, Set, with_assignments
from ops.cli.output import print_json
from ops.cli.service import Device, Http, Model, Redis, Zmq
from ops.exit_codes import ExitCode


def doctor(
    model: Model = None,
    redis: Redis = None,
    zmq: Zmq = None,
    http: Http = None,
    data_dir: DataDir = None,
    device: Device = None,
    config: Config = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Check everything a worker needs here, and say how to mend what is wrong.

    Takes the options that `serve` will be given.

    [dim]Example:[/dim] tokenbus doctor --redis redis://bus:6379/0

    [dim]Exit codes:[/dim] 0 nothing to mend, 10 something to mend
    """
    from dataclasses import asdict

    from ops.doctor import Level, examine
    from ops.settings import load

    flags = with_assignments(
        assignments,
        model=model,
        redis=redis,
        zmq=zmq,
        http=http,
        data_dir=data_dir,
        device=device,
    )
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
