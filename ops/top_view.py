"""How `tokenbus top` looks: a few lines about all, then a line a worker; made for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.top_sample import Rates, Sample, Trend, WorkerSample

WIDTH = 80
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 8
_LABEL, _VALUE = 10, 28  # columns before a sparkline or bar
_OTHER_LINES = 12  # besides the workers
_STYLES = {"ready": "green", "not ready": "yellow", "draining": "yellow", "gone": "red"}


def render(
    sample: Sample,
    trend: Trend,
    *,
    width: int = WIDTH,
    height: int = 24,
    footer: str = "",
    trouble: str = "",
) -> RenderableType:
    """The whole screen. trouble: why the sample is not fresh; shown in the place of the footer."""
    lines: list[RenderableType] = [
        _title(sample, width),
        Text(),
        _jobs_line(sample),
        _spark_line("tokens", f"{trend.total.tokens_s:,.0f} tok/s", trend.tokens_s, width, "cyan"),
        _spark_line("TTFT", _ttft(sample), trend.ttft_ms, width, "magenta"),
        _spark_line("ITL", _ms(trend.total.itl_ms), trend.itl_ms, width, "magenta"),
        _kv_line(sample, width),
        Text(),
        _workers_table(sample, trend, rows=max(1, height - _OTHER_LINES)),
    ]
    if trouble or footer:
        last = Text(trouble, style="bold red") if trouble else Text(footer, style="dim")
        lines += [Text(), last]
    return Group(*lines)


def sparkline(values: Sequence[float], cells: int) -> str:
    """The last `cells` values as blocks between 0 and the largest of them."""
    shown = list(values)[-cells:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(shown)
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(last, round(value / top * last))] for value in shown)


def bar(share: float, cells: int) -> Text:
    """A bar for 0 .. 1: green, yellow from 70 %, red from 90 %."""
    full = round(max(0.0, min(1.0, share)) * cells)
    style = "red" if share >= 0.9 else "yellow" if share >= 0.7 else "green"
    return Text.assemble(("━" * full, style), ("━" * (cells - full), "bright_black"))


def _title(sample: Sample, width: int) -> Text:
    num_ready = sum(worker.state == "ready" for worker in sample.workers)
    count = f"{num_ready} of {len(sample.workers)} workers ready"
    left = f"tokenbus · queue {sample.queue} · {sample.source}"
    left = left[: max(0, width - len(count) - 2)]
    space = " " * max(2, width - len(left) - len(count))
    return Text.assemble((left, "bold"), space, (count, "green" if num_ready else "bold red"))


def _jobs_line(sample: Sample) -> Text:
    rows = sum(worker.number("max_running") for worker in sample.workers)
    running = sum(worker.running for worker in sample.workers)
    waiting = sum(worker.waiting for worker in sample.workers)
    line = Text.assemble(
        (f"{'jobs':<{_LABEL}}", "bold"), f"running {running:,} of {rows:,.0f} rows"
    )
    line.append(f" · waiting {waiting:,}")
    if sample.backlog:
        parts = " ".join(f"{name} {count:,}" for name, count in sample.backlog.items() if count)
        in_redis = sum(sample.backlog.values())
        line.append(f" · in Redis {in_redis:,}" + (f" ({parts})" if parts else ""))
    if sample.dead:
        line.append(f" · dead {sample.dead:,}", "red")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _spark_line(name: str, text: str, history: Sequence[float], width: int, style: str) -> Text:
    line = Text.assemble((f"{name:<{_LABEL}}", "bold"), f"{text:<{_VALUE}}")
    cells = max(0, width - _LABEL - _VALUE)
    return line.append(sparkline(history, cells), style)


def _kv_line(sample: Sample, width: int) -> Text:
    used = sum(worker.number("used_blocks") for worker in sample.workers)
    total = sum(worker.number("total_blocks") for worker in sample.workers)
    share = used / total if total else 0.0
    text = f"{share:.0%} of {total:,.0f} blocks"
    line = Text.assemble((f"{'KV cache':<{_LABEL}}", "bold"), f"{text:<{_VALUE}}")
    return line.append_text(bar(share, max(0, width - _LABEL - _VALUE)))


def _workers_table(sample: Sample, trend: Trend, rows: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False, expand=True)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("model", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("state", no_wrap=True)
    for name in ("run", "wait", "tok/s", "TTFT", "ITL"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    busiest = sorted(sample.workers, key=lambda worker: (worker.state == "gone", worker.worker))
    for worker in busiest[:rows]:
        rates = trend.rates.get(worker.worker, Rates())
        table.add_row(
            worker.worker,
            worker.model,
            Text(worker.state, style=_STYLES.get(worker.state, "")),
            f"{worker.running:,}",
            f"{worker.waiting:,}",
            f"{rates.tokens_s:,.0f}",
            _short_ms(worker.number("ttft_p50_ms")),
            _short_ms(rates.itl_ms),
            _kv_cell(worker),
        )
    if len(busiest) > rows:
        table.add_row(f"... and {len(busiest) - rows} more")
    return table


def _kv_cell(worker: WorkerSample) -> Text:
    return Text.assemble(bar(worker.kv_share, _BAR_CELLS), f" {worker.kv_share:.0%}")


def _ttft(sample: Sample) -> str:
    p50 = max((worker.number("ttft_p50_ms") for worker in sample.workers), default=0.0)
    p95 = max((worker.number("ttft_p95_ms") for worker in sample.workers), default=0.0)
    return f"p50 {_ms(p50)}, p95 {_ms(p95)}" if p50 else "-"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value else "-"


def _short_ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}s"
    return f"{value:.0f}ms" if value >= 10 else f"{value:.1f}ms" if value else "-"
