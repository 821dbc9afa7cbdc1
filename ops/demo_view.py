"""How the demonstration looks: live lines on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ops.demo import JobRun

_TICK_PER_S = 20


class View(ABC):
    """What the demonstration tells while it runs."""

    @abstractmethod
    def note(self, text: str) -> None:
        """A line about what is being done."""

    @abstractmethod
    def ready(self, ready: dict[str, Any], after_s: float) -> None:
        """The worker takes jobs."""

    @abstractmethod
    def changed(self, run: JobRun) -> None:
        """Something arrived for this job."""

    @abstractmethod
    def result(self, runs: Sequence[JobRun], total_s: float) -> None:
        """All is over."""

    @contextmanager
    def live(self, runs: Sequence[JobRun]) -> Iterator[None]:
        """While jobs run."""
        yield


class _TableView(View):
    """What both views for people share."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def note(self, text: str) -> None:
        self.console.print(text)

    def ready(self, ready: dict[str, Any], after_s: float) -> None:
        pids = ready["pids"]
        self.console.print(
            f"Ready after {after_s:.1f} s: ZeroMQ {ready['zmq']}, Redis {ready['redis']}, "
            f"queue {ready['queue']}, broker {pids['broker']}, engine {pids['engine']}.",
            soft_wrap=True,
        )
        self.console.print("Eight chat jobs at once: odd ones by XADD, even ones over ZeroMQ.\n")

    def result(self, runs: Sequence[JobRun], total_s: float) -> None:
        table = Table(header_style="bold")
        for name in ("job", "door", "TTFT", "tokens", "tok/s", "finish"):
            is_text = name in ("job", "door", "finish")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
        for run in runs:
            table.add_row(
                run.job,
                run.door,
                f"{run.ttft_s * 1000:,.0f} ms",
                str(run.num_tokens),
                f"{run.tokens_per_s:.1f}",
                run.reason,
            )
        self.console.print()
        self.console.print(table)
        tokens = sum(run.num_tokens for run in runs)
        longest_s = max(run.total_s for run in runs)
        self.console.print(
            f"{tokens} tokens in {longest_s:.1f} s: {tokens / longest_s:.0f} tok/s together. "
            f"The worker drained and stopped; {total_s:.1f} s in all.",
            soft_wrap=True,
        )


class PlainView(_TableView):
    """A line for each arrival, so that a log shows the jobs side by side."""

    def changed(self, run: JobRun) -> None:
        if run.reason:
            self.console.print(f"{run.number} {run.door:<5} ended: {run.reason}", markup=False)
        elif run.text:
            tail = run.text[-60:].replace("\n", " ")
            self.console.print(
                f"{run.number} {run.door:<5} {run.num_tokens:>3} {tail}", markup=False
            )


class LiveView(_TableView):
    """One line a job, growing in place."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._runs: Sequence[JobRun] = ()

    @contextmanager
    def live(self, runs: Sequence[JobRun]) -> Iterator[None]:
        self._runs = runs
        with Live(
            get_renderable=self._lines, console=self.console, refresh_per_second=_TICK_PER_S
        ) as live:
            self._live = live
            yield
            live.refresh()

    def changed(self, run: JobRun) -> None:
        """Nothing to do: the display reads the runs at its own pace."""

    def _lines(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for width in (1, 5, 4):
            grid.add_column(width=width, justify="right" if width != 5 else "left")
        grid.add_column(no_wrap=True)
        room = max(20, self.console.width - 16)
        for run in self._runs:
            style = "green" if run.reason else "cyan" if run.num_tokens else "dim"
            text = run.text.replace("\n", " ") or run.prompt
            grid.add_row(
                Text(str(run.number), style=style),
                Text(run.door, style=style),
                Text(str(run.num_tokens), style=style),
                Text(text[-room:], style="dim" if not run.text else ""),
            )
        return grid


class JsonView(View):
    """Nothing until the end, then one object."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
        self._ready_s = 0.0

    def note(self, text: str) -> None:
        """Nothing: stdout is for the object."""

    def ready(self, ready: dict[str, Any], after_s: float) -> None:
        self._ready, self._ready_s = ready, after_s

    def changed(self, run: JobRun) -> None:
        """Nothing: stdout is for the object."""

    def result(self, runs: Sequence[JobRun], total_s: float) -> None:
        longest_s = max(run.total_s for run in runs)
        tokens = sum(run.num_tokens for run in runs)
        worker = {name: self._ready[name] for name in ("zmq", "redis", "queue", "model", "pids")}
        summary = {
            "worker": worker,
            "ready_s": round(self._ready_s, 2),
            "jobs": [run.facts() for run in runs],
            "tokens": tokens,
            "tokens_per_s": round(tokens / longest_s, 1),
            "total_s": round(total_s, 2),
        }
        print(json.dumps(summary, ensure_ascii=False))
