"""The command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `tokenbus`."""
    from ops.cli.app import app
    from ops.cli.output import fail
    from ops.exit_codes import CommandError, ExitCode

    try:
        app()
    except CommandError as error:
        fail(error, as_json="--json" in sys.argv[1:])
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()  # the prompt of the shell does not follow half an answer
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
    except BrokenPipeError:  # `tokenbus tail ... | head`
        sys.stderr.close()
        raise SystemExit(int(ExitCode.OK)) from None
