"""What `serve` says on the terminal while a worker starts, and the line when it is ready."""

from __future__ import annotations

import sys
from typing import Any

from ops.settings import public_url
from ops.worker_files import Announcement


class LoadBar:
    """A progress bar in bytes on stderr while the engine loads; nothing where there is no terminal.

    It appears with the first report and goes with `close`.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def update(self, what: str, done: int, total: int) -> None:
        """How far the load has come, in bytes."""
        if not self._is_shown:
            return
        if self._bars is None:
            self._open()
        self._bars.update(self._task, description=what, completed=done, total=total or None)

    def close(self) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("Loading {task.description}"), BarColumn(), DownloadColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task("", total=None)
        self._bars.start()


def ready_line(a: Announcement) -> str:
    """Every address in one line."""
    doors = [f"zmq {a.zmq}"] if a.zmq else []
    doors += [f"redis {public_url(a.redis)}"] if a.redis else []
    doors += [f"metrics {a.http}/metrics"] if a.http else []
    pids = ", ".join(f"{name} {pid}" for name, pid in a.pids.items())
    return f"ready: model {a.model} · queue {a.queue} · {' · '.join(doors)} · pids {pids}"
