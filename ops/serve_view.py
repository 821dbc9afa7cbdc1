"""What `serve` says on the terminal while a worker starts, and the line when it is ready."""

from __future__ import annotations

import sys
from typing import Any

from ops.settings import public_url
from ops.worker_files import Announcement


class LoadBar:
    """A progress bar in bytes on stderr while the engine loads; nothing where there is no terminal.

    It appears with the first report and goes with the last, or with `close`: the processes write
    their logs to the same terminal, and a line of theirs behind a bar cannot be read.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def update(self, what: str, done: int, total: int) -> None:
        """How far the load has come, in bytes."""
        if not self._is_shown:
            return
        if done >= total > 0:
            self.close()
            return
        if self._bars is None:
            self._bars, self._task = self._make()
        self._bars.update(self._task, description=what, completed=done, total=total or None)
        self._bars.start()  # again and again is fine

    def close(self) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _make(self) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("Loading {task.description}"), BarColumn(), DownloadColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True)
        return bars, bars.add_task("", total=None)


def ready_line(a: Announcement) -> str:
    """Every address in one line."""
    doors = [f"zmq {a.zmq}"] if a.zmq else []
    doors += [f"redis {public_url(a.redis)}"] if a.redis else []
    doors += [f"metrics {a.http}/metrics"] if a.http else []
    pids = ", ".join(f"{name} {pid}" for name, pid in a.pids.items())
    return f"ready: model {a.model} · queue {a.queue} · {' · '.join(doors)} · pids {pids}"
