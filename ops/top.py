"""The loop of `tokenbus top`: look, show, wait for a key."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from ops.top_sample import Sample, Trend
from ops.top_sources import Source
from ops.top_view import render
from tokenbus.errors import BusUnavailable

FOOTER = "q quits"
SETTLE_S = 5.0  # by then every worker that lives has told of itself twice


def settled(source: Source, period_s: float = 0.25) -> tuple[Sample, Trend]:
    """A sample with rates: looks until every worker has told twice. Raises BusUnavailable."""
    trend, deadline_s = Trend(), time.monotonic() + SETTLE_S
    while True:
        sample = source.look()
        trend.add(sample)
        if trend.is_settled or time.monotonic() > deadline_s:
            return sample, trend
        time.sleep(period_s)


def show_once(source: Source, console: Console) -> None:
    """One picture. Raises BusUnavailable."""
    sample, trend = settled(source)
    console.print(render(sample, trend, width=console.width, height=1_000))


def run(source: Source, console: Console, period_s: float) -> None:
    """Until q or Ctrl-C. Raises BusUnavailable only if the first look fails."""
    trend, sample, trouble = Trend(), source.look(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live, keys() as wait_for_key:
        while True:
            trend.add(sample)
            picture = render(
                sample,
                trend,
                width=console.width,
                height=console.height,
                footer=FOOTER,
                trouble=trouble,
            )
            live.update(picture, refresh=True)
            if wait_for_key(period_s) in ("q", "Q"):
                return
            try:
                sample, trouble = source.look(), ""
            except BusUnavailable as error:
                trouble = error.message


class KeyReader:
    """Waits for one key on the terminal."""

    def __call__(self, timeout_s: float) -> str:
        """The key, or an empty string after timeout_s, or q at the end of the input."""
        ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
        return (sys.stdin.read(1) or "q") if ready else ""


@contextmanager
def keys() -> Iterator[KeyReader]:
    """Keys come one by one and are not echoed; without a terminal none come."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _NoKeys()
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield KeyReader()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _NoKeys(KeyReader):
    def __call__(self, timeout_s: float) -> str:
        time.sleep(timeout_s)
        return ""
