"""One child process of the supervisor: started so that it cannot outlive it, watched until it ends.

Knows processes, signals and the status pipe; knows no policy (see `supervisor.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

log = structlog.get_logger("ops.child")

_PR_SET_PDEATHSIG = 1  # prctl(2)
_STATUS_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child. `{status_fd}` in argv becomes the number of the pipe's writing end.

    death_signal: what the kernel sends the child when the supervisor dies without a word.
    """

    name: str
    argv: tuple[str, ...]
    death_signal: signal.Signals = signal.SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_status(self) -> bool:
        """Whether the child reports over a status pipe."""
        return "{status_fd}" in self.argv


@dataclass(frozen=True, slots=True)
class Child:
    """A running child. `status` yields its JSON lines and ends with the pipe."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    status: asyncio.StreamReader | None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it has ended already."""
        if self.process.returncode is None:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                log.debug("child.gone", child=self.spec.name, signal=number.name)

    async def status_lines(self) -> AsyncIterator[dict[str, Any]]:
        """Its status objects, until it closes the pipe. A line that is not JSON is logged."""
        if self.status is None:
            return
        while line := await self.status.readline():
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError):
                log.warning("child.bad_status", child=self.spec.name, line=line[:200])


async def start_child(spec: ChildSpec) -> Child:
    """Start the process in a session of its own (Ctrl-C reaches the supervisor alone).

    Raises OSError if the program cannot be started.
    """
    reader_fd, writer_fd = os.pipe() if spec.has_status else (-1, -1)
    argv = [str(writer_fd) if arg == "{status_fd}" else arg for arg in spec.argv]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # stdout is for the ready line alone
            pass_fds=(writer_fd,) if spec.has_status else (),
            start_new_session=True,
            preexec_fn=_die_with_parent(spec.death_signal),
            env={**os.environ, **spec.env},
        )
    except BaseException:
        if spec.has_status:
            os.close(reader_fd)
        raise
    finally:
        if spec.has_status:
            os.close(writer_fd)
    status = await _open_reader(reader_fd) if spec.has_status else None
    return Child(spec, process, status)


async def _open_reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_STATUS_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader


def _die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What the child does between fork and exec; Linux only, elsewhere orphans may stay."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return prepare


def describe_exit(returncode: int) -> str:
    """`exit code 3`, or `killed by SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
