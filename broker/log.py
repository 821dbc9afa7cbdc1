"""Logging of every process of a worker: readable lines on a terminal, JSON lines otherwise, always
to stderr. And the line about a failed start, for whoever started the process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")

_EVENT_WIDTH = 24  # the longest common event; longer ones push their own line only
_FIRST = ("timestamp", "level", "event")


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """`--log-level` and `--log-format`, for `configure_logging`."""
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument(
        "--log-format", choices=FORMATS, default="auto", help="auto: console on a terminal"
    )


def configure_logging(*, format_: str = "auto", level: str = "info") -> None:
    """Set up structlog once for this process.

    Args:
        format_: "json" (one object a line), "console" (for a person), or "auto": by where stderr
            leads.
        level: one of LEVELS.

    Raises:
        KeyError: an unknown level name.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    is_json = is_json_log(format_)
    renderers: list[structlog.typing.Processor] = (
        [_with_event_first, structlog.processors.JSONRenderer()]
        if is_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=_EVENT_WIDTH, sort_keys=False
            )
        ]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S", utc=is_json),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        # One write a line: several processes write to the same file or pipe.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """stderr, for a process that outlives the reader of its log (`tokenbus serve 2>&1 | head`)."""

    def write(self, text: str) -> None:
        """Write, or lose what nobody reads."""
        with suppress(BrokenPipeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """The same."""
        with suppress(BrokenPipeError):
            sys.stderr.flush()


def is_json_log(format_: str) -> bool:
    """Whether a log of this format is JSON lines."""
    return format_ == "json" or (format_ == "auto" and not sys.stderr.isatty())


def report_failure(status_fd: int | None, error: str) -> None:
    """Say on the status pipe why this process ends; a supervisor that is gone need not know."""
    if status_fd is None:
        return
    line = json.dumps({"event": "failed", "error": error}) + "\n"
    with suppress(BrokenPipeError):
        os.write(status_fd, line.encode())


def _with_event_first(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """When, how bad and what before all details: lines are read from their left end."""
    return {name: event.pop(name) for name in _FIRST if name in event} | dict(event)
