"""`python -m broker --config FILE [--status-fd N]`: the broker process.

Exit codes: 0 after a drain, 1 after a crash of an actor; starting it again does not help after 3
(a setting that cannot work), 4 (a model it cannot read) and 5 (an address that cannot be had).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import structlog
import uvloop
import zmq

from broker.actor import ActorCrashed
from broker.app import run
from broker.config import BrokerConfig
from broker.gateway.security import InsecureBind
from broker.log import add_log_arguments, configure_logging, report_failure
from broker.ring.errors import LinkError, RingLayoutError
from tokenbus.errors import TokenbusError

EXIT_CRASHED = 1  # the supervisor starts the broker again
EXIT_BAD_SETTING = 3
EXIT_NO_MODEL = 4
EXIT_NO_ADDRESS = 5


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m broker", description="The broker process.")
    parser.add_argument("--config", type=Path, required=True, help="BrokerConfig as JSON")
    parser.add_argument("--status-fd", type=int, metavar="FD", help="descriptor for status lines")
    add_log_arguments(parser)
    args = parser.parse_args()
    configure_logging(format_=args.log_format, level=args.log_level)
    log = structlog.get_logger("broker")
    try:
        config = BrokerConfig.from_json(args.config.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.error("broker.cannot_start", config=str(args.config), error=repr(error))
        report_failure(args.status_fd, f"{args.config}: {error!r}")
        return EXIT_BAD_SETTING
    try:
        uvloop.run(run(config, args.status_fd))
    except ActorCrashed:
        return EXIT_CRASHED
    except (
        InsecureBind,
        TokenbusError,
        LinkError,
        RingLayoutError,
        zmq.ZMQError,
        OSError,
    ) as error:
        log.error("broker.cannot_start", error=f"{type(error).__name__}: {error}")
        report_failure(args.status_fd, str(error))
        return _exit_code(error)
    return 0


def _exit_code(error: Exception) -> int:
    """What the supervisor, and whoever started it, should make of the error."""
    if isinstance(error, TokenbusError) and error.field == "model":
        return EXIT_NO_MODEL
    if isinstance(error, zmq.ZMQError | LinkError | OSError):
        return EXIT_NO_ADDRESS
    return EXIT_BAD_SETTING


if __name__ == "__main__":
    sys.exit(main())
