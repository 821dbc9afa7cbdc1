"""A unix socket's place in the file system: private, and safe to take over after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from broker.ring.errors import LinkInUse, LinkPathTooLong, LinkPathUnsafe

#: sizeof(sockaddr_un.sun_path) on Linux, less the closing zero byte.
MAX_PATH_BYTES: Final = 107


def check_length(path: Path) -> None:
    """Raises LinkPathTooLong if the path does not fit into a socket address."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise LinkPathTooLong(
            f"socket path has {length} bytes, the limit is {MAX_PATH_BYTES}: {path}; "
            "choose a shorter directory, for instance under /run or /tmp"
        )


def listen(path: Path) -> socket.socket:
    """A listening SEQPACKET socket on the path, mode 0600; a dead process's leftover is replaced.

    The lock on the directory keeps two processes from replacing each other's fresh socket; the
    kernel drops it with its holder, so it leaves nothing behind.
    Raises LinkPathTooLong, LinkPathUnsafe, LinkInUse.
    """
    check_length(path)
    _make_private_dir(path.parent)
    with _locked_dir(path.parent):
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(os.fspath(path))
            path.chmod(0o600)
            sock.listen(16)
        except BaseException:
            sock.close()
            raise
        return sock


def unlink(path: Path, inode: int) -> None:
    """Remove the socket file, unless another process has put its own in the place since."""
    with suppress(FileNotFoundError), _locked_dir(path.parent):
        if path.stat().st_ino == inode:
            path.unlink()


def _make_private_dir(directory: Path) -> None:
    """Make the directory with mode 0700, or check that nobody else can put files into it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise LinkPathUnsafe(
            f"{directory} belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}; "
            "another user could replace the socket: use a directory of your own with mode 0700"
        )


@contextmanager
def _locked_dir(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on. The directory is locked."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise LinkPathUnsafe(f"{path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        # A listener with a full backlog would block the probe: that is a listener all the same.
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code != errno.ECONNREFUSED:
        raise LinkInUse(
            f"another process listens on {path} ({os.strerror(code)}); "
            "stop it, or give this worker a directory of its own"
        )
    path.unlink()
