"""Logging of the broker and the engine process: readable lines on a terminal, JSON lines otherwise,
always to stderr.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(json: bool, level: str = "info") -> None:
    """Set up structlog once for this process.

    Args:
        json: one JSON object a line; False: aligned columns for a person.
        level: a name of the logging module in lower case ("debug", "info", "warning", "error").

    Raises:
        KeyError: an unknown level name.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
