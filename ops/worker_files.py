"""The files of a running worker: private configurations and socket, its announcement, the lock.

`<tmp>/tokenbus-<pid>-*` (0700) holds what the processes read and the socket they meet at; it goes
with the worker. `<data-dir>/workers/<pid>.json` tells client commands on this host the addresses.
`<data-dir>/lock` keeps two workers from running a Redis in one directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.exit_codes import CommandError, ExitCode

_RUN_DIR = re.compile(r"tokenbus-(\d+)-\w+")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a ready worker says of itself. zmq, redis and http are empty where that is closed."""

    zmq: str
    redis: str
    queue: str
    model: str
    worker: str
    pids: dict[str, int]
    http: str = ""


def is_alive(pid: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory with a short name (socket paths are limited to 107 bytes)."""
    base = Path(tempfile.gettempdir())
    _sweep(base)
    directory = Path(tempfile.mkdtemp(prefix=f"tokenbus-{os.getpid()}-", dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove what workers left that were killed without a chance to clean up."""
    for path in base.glob("tokenbus-*-*"):
        match = _RUN_DIR.fullmatch(path.name)
        if match and not is_alive(int(match[1])) and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read: it may hold a password."""
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    return path


def make_data_dir(data_dir: Path) -> None:
    """Raises CommandError where there can be none, or none to write to."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        (data_dir / "lock").touch(mode=0o600)
    except OSError as error:
        raise CommandError(
            ExitCode.BAD_SETTING,
            f"data_dir = {data_dir}: {error.strerror or error}",
            "Give --data-dir a directory that can be made and written to.",
        ) from error


@contextmanager
def data_lock(data_dir: Path) -> Iterator[None]:
    """Own the data directory while the worker lives. Raises CommandError if another one does."""
    import fcntl  # not on Windows, where serve does not run either

    with (data_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                ExitCode.BUS_UNAVAILABLE,
                f"another worker runs its embedded Redis in {data_dir}",
                "Give this one its own --data-dir, or join the other with --redis and its URL.",
            ) from None
        yield


# ---------------------------------------------------------------- announcement


def announce(data_dir: Path, announcement: Announcement) -> None:
    """Write or replace this worker's announcement, atomically."""
    directory = data_dir / "workers"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = directory / f"{announcement.pids['supervisor']}.json"
    partial = write_private(target.with_suffix(".tmp"), json.dumps(asdict(announcement)))
    partial.replace(target)


def withdraw(data_dir: Path) -> None:
    """Remove this process's announcement."""
    (data_dir / "workers" / f"{os.getpid()}.json").unlink(missing_ok=True)


def find_workers(data_dir: Path, queue: str | None = None) -> list[Announcement]:
    """Announcements of living workers on this host, the newest first; dead ones are removed."""
    found: list[tuple[float, Announcement]] = []
    for path in (data_dir / "workers").glob("*.json"):
        try:
            announcement = Announcement(**json.loads(path.read_text()))
            time = path.stat().st_mtime
        except (OSError, ValueError, TypeError):
            continue
        if not is_alive(announcement.pids["supervisor"]):
            path.unlink(missing_ok=True)
        elif queue is None or announcement.queue == queue:
            found.append((time, announcement))
    return [announcement for _, announcement in sorted(found, key=lambda item: -item[0])]
