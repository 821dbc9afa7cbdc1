"""A worker as another program starts it: `tokenbus serve --json` in a process, ready or an error.

Used by the demonstration, by benchmarks and by the tests that treat the worker as a user would.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.exit_codes import CommandError, ExitCode

READY_TIMEOUT_S = 120.0
_LOG_LINES = 15


class WorkerFailed(CommandError):
    """The worker ended, or was not ready in time; the text has the end of its log."""


@dataclass(slots=True)
class WorkerProcess:
    """A running `serve`. `ready`: its last ready or restarted event, with addresses and pids."""

    process: asyncio.subprocess.Process
    log_file: Path
    ready: dict[str, Any]

    @property
    def pids(self) -> dict[str, int]:
        """supervisor, broker, engine, and redis where it is embedded."""
        return dict(self.ready["pids"])

    async def next_event(self, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """The next ready or restarted event. Raises WorkerFailed at the end of the process."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise self._failed(f"said nothing for {timeout_s:.0f} s") from None
        if not line:
            code = await self.process.wait()
            raise self._failed(f"ended with exit code {code}", code)
        event = dict(json.loads(line))
        if "error" in event:
            await self.process.wait()
            raise self._given_up(event)
        self.ready = event
        return self.ready

    async def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Drain it and return its exit code; killed if it takes longer."""
        if self.process.returncode is None:
            self.process.send_signal(number)
            try:
                await asyncio.wait_for(self.process.wait(), timeout_s)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        return int(self.process.returncode or 0)

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(lines[-_LOG_LINES:])

    def _given_up(self, said: Mapping[str, Any]) -> WorkerFailed:
        """What `serve` says at its end; behind a crash, which it cannot explain, its log."""
        code = ExitCode(said["exit_code"])
        message = f"the worker ended: {said['error']}"
        if code in (ExitCode.ENGINE_LOST, ExitCode.BROKER_LOST):
            message += f"; its log ends:\n{self.log_tail()}"
        return WorkerFailed(code, message, said["remedy"])

    def _failed(self, what: str, code: int = int(ExitCode.FAILED)) -> WorkerFailed:
        known = ExitCode(code) if code in set(ExitCode) and code else ExitCode.FAILED
        return WorkerFailed(known, f"the worker {what}; its log ends:\n{self.log_tail()}")


@asynccontextmanager
async def run_worker(
    data_dir: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[WorkerProcess]:
    """A ready worker with its data and log in `data_dir`, stopped at the end.

    arguments: for `serve`; without --zmq a free port is taken. Raises WorkerFailed.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    log_file = data_dir / "worker.log"
    command = [sys.executable, "-c", "from ops.cli import main; main()", "serve", "--json"]
    command += ["--data-dir", str(data_dir)]
    if "--zmq" not in arguments:
        command += ["--zmq", "tcp://127.0.0.1:0"]
    with log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to pass on
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
        )
    worker = WorkerProcess(process, log_file, {})
    try:
        await worker.next_event()
        yield worker
    finally:
        await worker.stop()
