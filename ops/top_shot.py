"""`python -m ops.top_shot`: the picture of `tokenbus top` in the README, taken under real load.

Starts workers on one queue, keeps more jobs at them than they can run at once, through both doors,
looks once a second as `tokenbus top` does, and writes the last screen as SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rich.console import Console

from ops.docs_tables import ROOT
from ops.top import FOOTER
from ops.top_sample import Sample, Trend
from ops.top_sources import RedisSource
from ops.top_view import render
from ops.worker_process import WorkerProcess, run_worker
from tokenbus import AsyncClient
from tokenbus.request import Priority

WIDTH, HEIGHT = 80, 15
KV_BYTES = 60_000_000  # so that a few short jobs show in the bar
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
PROMPTS = (
    "Tell a story about a lighthouse.",
    "How does a message queue work?",
    "Describe the sea to somebody who has never seen it.",
    "What is a compiler?",
)
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "normal", "low")


def main() -> None:
    """Parse the command line, run, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "top.svg")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="engine.max_num_seqs of each")
    parser.add_argument("--jobs", type=int, default=22, help="open at any time")
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    svg = asyncio.run(_shoot(args.model, args.workers, args.rows, args.jobs, args.seconds))
    args.out.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"wrote {args.out}")


async def _shoot(model: str, num_workers: int, rows: int, num_jobs: int, seconds: int) -> str:
    async with _workers(model, num_workers, rows) as workers:
        redis, queue = workers[0].ready["redis"], workers[0].ready["queue"]
        async with AsyncExitStack() as stack:
            doors = [await stack.enter_async_context(AsyncClient(redis=redis, queue=queue))]
            for worker in workers:
                client = AsyncClient(zmq=worker.ready["zmq"])
                doors.append(await stack.enter_async_context(client))
            load = [
                asyncio.create_task(_keep_busy(doors[number % len(doors)], number))
                for number in range(num_jobs)
            ]
            try:
                sample, trend = await _watch(RedisSource(redis, queue), seconds)
            finally:
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
    return _picture(sample, trend)


@asynccontextmanager
async def _workers(model: str, count: int, rows: int) -> AsyncIterator[list[WorkerProcess]]:
    """The first has an embedded Redis; the others join it."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-shot-") as directory:
        async with AsyncExitStack() as stack:
            workers: list[WorkerProcess] = []
            for number in range(count):
                arguments = ["--model", model, "--set", f"engine.max_num_seqs={rows}"]
                arguments += ["--set", "engine.num_threads=1", "--drain-s", "0"]
                arguments += ["--set", f"engine.kv_cache_bytes={KV_BYTES}"]
                arguments += ["--set", "engine.max_model_len=1024"]
                if workers:
                    arguments += ["--redis", workers[0].ready["redis"]]
                worker = run_worker(Path(directory) / f"worker-{number}", arguments)
                workers.append(await stack.enter_async_context(worker))
            yield workers


async def _keep_busy(client: AsyncClient, number: int) -> None:
    """One job after another, of different lengths."""
    for turn in itertools.count(number):
        stream = client.generate(
            messages=[{"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}],
            max_tokens=24 + 8 * (turn % 5),
            priority=PRIORITIES[number % len(PRIORITIES)],
            temperature=0.7,
        )
        async for _ in stream:
            pass


async def _watch(source: RedisSource, seconds: int) -> tuple[Sample, Trend]:
    trend = Trend()
    for _ in range(max(2, seconds)):
        sample = await asyncio.to_thread(source.look)
        trend.add(sample)
        await asyncio.sleep(1.0)
    source.close()
    return sample, trend


def _picture(sample: Sample, trend: Trend) -> str:
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True
    )
    console.print(render(sample, trend, width=WIDTH, height=HEIGHT, footer=FOOTER))
    return _with_local_fonts(console.export_svg(title="tokenbus top"))


def _with_local_fonts(svg: str) -> str:
    """Without the fonts that rich would have loaded from the network: the viewer's own will do."""
    svg = re.sub(r"@font-face \{[^}]*\}\s*", "", svg)
    return svg.replace("font-family: Fira Code, monospace", f"font-family: {FONTS}")


if __name__ == "__main__":
    main()
