"""Start processes, wait for what they say, and stop, continue or kill them at a chosen moment."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

STATUS_FD = "{status_fd}"  # replaced in a command by the number of the status pipe


class Child:
    """A child process that prints JSON lines, on stdout or on a status pipe.

    command: may hold STATUS_FD, then events are read from that pipe, else from stdout.
    log_path: where stderr goes; its end is part of every failure message.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log_path = log_path
        self.events: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        has_pipe = any(STATUS_FD in part for part in command)
        read_fd, write_fd = os.pipe()
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [part.replace(STATUS_FD, str(write_fd)) for part in command],
                env=None if env is None else {**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log if has_pipe else write_fd,
                stderr=log,
                pass_fds=(write_fd,) if has_pipe else (),
            )
        os.close(write_fd)
        self._pipe: IO[bytes] = os.fdopen(read_fd, "rb")
        self._reader = threading.Thread(target=self._read_events, name="child-events")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_event(
        self,
        event: str,
        timeout_s: float = 30.0,
        where: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """The next event of this name (and `where`), skipping others. AssertionError if none."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.001))
                if line is None:
                    raise AssertionError(f"process ended before {event!r}: {self.describe()}")
                if line.get("event") == event and where(line):
                    return line
                continue
            raise AssertionError(f"no {event!r} within {timeout_s} s: {self.describe()}")

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        """Exit status (negative: the signal that killed it). AssertionError if it runs on."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"still runs after {timeout_s} s: {self.describe()}"
            raise AssertionError(message) from None

    def terminate(self) -> None:
        """SIGTERM: the polite end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9 and reap."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """kill -9 if it still runs, and let go of its pipe."""
        if self._process.poll() is None:
            self.kill()
        self._reader.join(10)
        if not self._reader.is_alive():  # else a grandchild still holds the pipe
            self._pipe.close()

    def describe(self) -> str:
        """Command, state, events so far and the end of the log."""
        log = self.log_path.read_text(errors="replace")[-2000:]
        return (
            f"{self._process.args!r}, exit status {self._process.poll()}, "
            f"events {self.events[-5:]}, log: {log}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_events(self) -> None:
        for line in self._pipe:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self.events.append(event)
                    self._lines.put(event)
        self._lines.put(None)


def stop(pid: int, timeout_s: float = 5.0) -> None:
    """SIGSTOP any process, and return when all of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    _wait_until(lambda: state_of(pid) == "T", f"process {pid} stopped", timeout_s)


def resume(pid: int, timeout_s: float = 5.0) -> None:
    """SIGCONT any process, and return when it runs again."""
    os.kill(pid, signal.SIGCONT)
    _wait_until(lambda: state_of(pid) != "T", f"process {pid} resumed", timeout_s)


def kill(pid: int, timeout_s: float = 5.0) -> None:
    """kill -9 any process, child or not, and return when it is dead (perhaps not reaped)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_dead(pidfd, f"process {pid}", timeout_s)
    finally:
        os.close(pidfd)


def wait_dead(pidfd: int, name: str, timeout_s: float) -> None:
    """Wait for the end of the process behind a pidfd. AssertionError if it lives on."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        raise AssertionError(f"{name} is alive {timeout_s} s later")


def state_of(pid: int) -> str:
    """The kernel's letter: R, S, D, T (stopped), Z (dead, not reaped); empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """There is such a process, and it is more than what its parent has to reap."""
    return state_of(pid) not in ("", "Z")


def descendants(pid: int) -> list[int]:
    """All children, their children and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _wait_until(is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
    """For the few states of a process that nothing can be awaited for."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.001)
