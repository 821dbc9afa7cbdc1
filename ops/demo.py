"""The demonstration: a worker, eight chat jobs at once over both doors, every token as it comes.

The Redis half is written as a stranger would: plain XADD and XREAD, no client library of ours. Run
it with `ops/demo.sh`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.cli.model import resolve_with_bar
from ops.cli.output import fail
from ops.demo_view import JsonView, LiveView, PlainView, View
from ops.exit_codes import CommandError, ExitCode
from ops.models import DEFAULT_MODEL
from ops.worker_process import run_worker

PROMPTS = (
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "What is a message queue?",
    "Name three fruits and their colours.",
    "Explain gravity to a child.",
    "What does a compiler do?",
    "Give me a tip for better sleep.",
    "Who was Ada Lovelace?",
)
JOB_TIMEOUT_S = 300.0


@dataclass(slots=True)
class JobRun:
    """One job of the demonstration, as its client sees it. Times in seconds since submission."""

    number: int
    door: str
    prompt: str
    job: str = ""
    text: str = ""
    num_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    reason: str = ""
    _start: float = 0.0

    def submitted(self) -> None:
        """The clock starts."""
        self._start = time.monotonic()

    def got(self, text: str, num_tokens: int) -> None:
        """Tokens arrived."""
        if not self.num_tokens and num_tokens:
            self.ttft_s = time.monotonic() - self._start
        self.num_tokens += num_tokens
        self.text += text

    def ended(self, reason: str) -> None:
        """The terminal event arrived."""
        self.reason = reason
        self.total_s = time.monotonic() - self._start

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token; 0 where there is none."""
        decode_s = self.total_s - self.ttft_s
        return (self.num_tokens - 1) / decode_s if self.num_tokens > 1 and decode_s > 0 else 0.0

    def facts(self) -> dict[str, Any]:
        """A row of the table, for programs."""
        return {
            "job": self.job,
            "door": self.door,
            "prompt": self.prompt,
            "text": self.text,
            "ttft_ms": round(self.ttft_s * 1000, 1),
            "tokens": self.num_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "finish_reason": self.reason,
        }


async def run_over_redis(
    run: JobRun, url: str, queue: str, max_tokens: int, on_change: Callable[[JobRun], None]
) -> None:
    """A job by plain Redis commands, as any client in any language would send them."""
    from redis.asyncio import Redis

    messages = json.dumps([{"role": "user", "content": run.prompt}])
    async with Redis.from_url(url, decode_responses=True) as redis:
        run.submitted()
        jobs = f"tokenbus:{{{queue}}}:jobs"
        body = {"messages": messages, "max_tokens": max_tokens}
        run.job = str(await redis.xadd(jobs, body))  # type: ignore[arg-type]
        out, last = f"tokenbus:{{{queue}}}:out:{run.job}", "0"
        while not run.reason:
            reply = await redis.xread({out: last}, block=1000)
            for entry_id, fields in _entries(reply):
                last = entry_id
                if fields["event"] == "tokens":
                    run.got(fields["text"], len(json.loads(fields["ids"])))
                elif fields["event"] == "done":
                    run.got(fields.get("text", ""), 0)
                    run.ended(fields["reason"])
                elif fields["event"] == "error":
                    run.ended(f"error: {fields['code']}: {fields['message']}")
                on_change(run)


def _entries(reply: Any) -> list[tuple[str, dict[str, str]]]:
    """The entries of the one stream in an XREAD reply: a list, or in RESP3 a map."""
    streams = reply.items() if isinstance(reply, dict) else reply or []
    found: list[tuple[str, dict[str, str]]] = []
    for _, entries in streams:
        for entry in entries:
            found += [entry] if isinstance(entry, tuple) else entry
    return found


async def run_over_zmq(
    run: JobRun, endpoint: str, max_tokens: int, on_change: Callable[[JobRun], None]
) -> None:
    """A job by the `tokenbus` package."""
    from tokenbus import AsyncClient
    from tokenbus.errors import TokenbusError

    messages = [{"role": "user", "content": run.prompt}]
    async with AsyncClient(zmq=endpoint) as client:
        run.submitted()
        run.job = f"demo-{run.number}"
        stream = client.generate(messages=messages, max_tokens=max_tokens, job=run.job)
        try:
            async for tokens in stream:
                run.got(tokens.text, len(tokens.ids))
                on_change(run)
            run.ended(stream.done.reason if stream.done else "error: no end")
        except TokenbusError as error:
            run.ended(f"error: {error.code}: {error.message}")
        on_change(run)


async def demonstrate(model: str, max_tokens: int, view: View) -> list[JobRun]:
    """Start a worker, run the jobs, stop the worker. Raises CommandError."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenbus-demo-") as directory:
        data_dir = Path(directory)
        view.note(f"Starting a worker for {model} with an embedded Redis ...")
        async with run_worker(data_dir, ["--model", model]) as worker:
            ready = worker.ready
            view.ready(ready, time.monotonic() - started)
            runs = [
                JobRun(number, "redis" if number % 2 else "zmq", prompt)
                for number, prompt in enumerate(PROMPTS, start=1)
            ]
            with view.live(runs):
                jobs = [_run(run, ready, max_tokens, view.changed) for run in runs]
                try:
                    await asyncio.wait_for(asyncio.gather(*jobs), JOB_TIMEOUT_S)
                except TimeoutError:
                    why = f"the jobs took longer than {JOB_TIMEOUT_S:.0f} s; the log ends:\n"
                    raise CommandError(ExitCode.JOB_FAILED, why + worker.log_tail()) from None
            code = await worker.stop()
        if code != ExitCode.OK:
            message = f"the worker stopped with exit code {code}; its log ends:\n"
            raise CommandError(ExitCode.FAILED, message + worker.log_tail())
    view.result(runs, time.monotonic() - started)
    return runs


async def _run(
    run: JobRun, ready: dict[str, Any], max_tokens: int, on_change: Callable[[JobRun], None]
) -> None:
    if run.door == "redis":
        await run_over_redis(run, ready["redis"], ready["queue"], max_tokens, on_change)
    else:
        await run_over_zmq(run, ready["zmq"], max_tokens, on_change)


def main() -> None:
    """Entry point of `python -m ops.demo`."""
    parser = argparse.ArgumentParser(prog="ops/demo.sh", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="a job; default: %(default)s")
    options = parser.parse_args()
    view: View
    if options.json:
        view = JsonView()
    else:
        view = LiveView() if sys.stdout.isatty() else PlainView()
    try:
        resolve_with_bar(options.model)
        runs = asyncio.run(demonstrate(options.model, options.max_tokens, view))
    except CommandError as error:
        fail(error, as_json=options.json)
    except KeyboardInterrupt:
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
    failed = [run for run in runs if run.reason.startswith("error")]
    raise SystemExit(int(ExitCode.JOB_FAILED if failed else ExitCode.OK))


if __name__ == "__main__":
    main()
