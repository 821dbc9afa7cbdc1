"""How broker and engine find each other and come to share two rings.

The broker listens on a unix socket in a directory of its own. For each engine that connects it
checks the user, makes two rings in anonymous memory (memfd: no name to clash or to unlink, and the
kernel frees it with the last process that holds it) with two eventfds each, and passes the six
descriptors over the socket. After that the socket carries nothing; its end of file says that the
peer is gone, at once, also after kill -9. One connection is one incarnation: both sides drop its
rings when it ends, after reading what the dead peer had still published.

    engine                                broker
    connect
    hello: magic, version          ->     accept, user and version checked
                                   <-     welcome: magic, version, ring size, 6 descriptors
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from broker.ring import handshake, layout, sockpath
from broker.ring.errors import (
    LinkNoResources,
    LinkPeerGone,
    LinkUnavailable,
    LinkVersionMismatch,
)
from broker.ring.ring import Ring, RingReader, RingWriter
from broker.ring.wake import Bell

#: How long a side that has connected may take for its half of the handshake.
HANDSHAKE_TIMEOUT_S: Final = 0.5

_CONNECT_RETRY_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2)


class RingChannel:
    """One ring with its memory and bells, as one process holds it."""

    def __init__(self, memory_fd: int, reader_bell: Bell, writer_bell: Bell, create: bool) -> None:
        """Map the memory and lay out (`create`) or open the ring. Takes the bells, not the fd."""
        self.reader_bell = reader_bell
        self.writer_bell = writer_bell
        # MAP_POPULATE: every page is there from the start, so no page fault and no memory growth
        # comes later, and a machine without the memory says so now and not by a SIGBUS.
        self._memory = mmap.mmap(
            memory_fd, os.fstat(memory_fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        try:
            self.ring = Ring.create(self._memory) if create else Ring.attach(self._memory)
        except BaseException:
            self._memory.close()
            raise

    def close(self) -> None:
        """Release the views, unmap, close the bells. A second call does nothing."""
        self.ring.release()
        self._memory.close()
        self.reader_bell.close()
        self.writer_bell.close()


class _Link:
    """What both ends of a link have: the socket, two channels, and how they end."""

    def __init__(self, sock: socket.socket, requests: RingChannel, events: RingChannel) -> None:
        self.sock = sock
        self.peer_pid = handshake.peer_credentials(sock)[0]
        self._channels = (requests, events)

    def is_peer_gone(self) -> bool:
        """Whether the peer closed its end or died. Read the ring once more after a True."""
        if self.sock.fileno() < 0:
            return True
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Drop the rings and the socket; the peer sees the end of file. May be called again."""
        self.sock.close()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class BrokerLink(_Link):
    """The broker's end: writes `requests`, reads `events`. `sock` is readable at end of file."""

    def __init__(self, sock: socket.socket, requests: RingChannel, events: RingChannel) -> None:
        super().__init__(sock, requests, events)
        self.requests = RingWriter(requests.ring, requests.reader_bell, requests.writer_bell)
        self.events = RingReader(events.ring, events.reader_bell, events.writer_bell)


class EngineLink(_Link):
    """The engine's end: reads `requests`, writes `events`."""

    def __init__(self, sock: socket.socket, requests: RingChannel, events: RingChannel) -> None:
        super().__init__(sock, requests, events)
        self.requests = RingReader(requests.ring, requests.reader_bell, requests.writer_bell)
        self.events = RingWriter(events.ring, events.reader_bell, events.writer_bell)

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Block until a request is there (True), or the broker is gone or time is up (False)."""
        return self.requests.wait(timeout_s, spin_s, self.sock.fileno())


class LinkListener:
    """The broker's listening socket. Every accepted engine gets fresh rings."""

    def __init__(self, path: str | Path, ring_bytes: int) -> None:
        """Listen on `path`.

        Args:
            path: of the socket; its directory is made with mode 0700 if it is missing. A socket
                that a dead process left there is replaced.
            ring_bytes: capacity of each of the two rings, a power of two.
        Raises LinkPathTooLong, LinkPathUnsafe, LinkInUse, RingLayoutError.
        """
        self._memory_bytes = layout.memory_bytes(ring_bytes)
        self.path = Path(path)
        self._sock = sockpath.listen(self.path)
        self._inode = self.path.stat().st_ino

    def fileno(self) -> int:
        """Readable when `accept` has a connection to take."""
        return self._sock.fileno()

    def accept(self, timeout_s: float = 0.0) -> BrokerLink:
        """Take one connection, check it and hand it two fresh rings.

        timeout_s bounds the wait for a connection; its hello must follow within half a second.
        Raises LinkUnavailable (nobody connected), LinkRefused, LinkVersionMismatch, LinkPeerGone,
        LinkNoResources; the listener stays usable after each.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise LinkUnavailable(f"no engine connected to {self.path} within {timeout_s} s")
        with ExitStack() as on_error:
            try:
                sock, _ = self._sock.accept()
                on_error.callback(sock.close)
                handshake.check_user(sock)
                sock.settimeout(HANDSHAKE_TIMEOUT_S)
                self._check_hello(sock)
                link = self._join(sock)
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise LinkNoResources(f"no rings for another engine: {e}") from e
                raise LinkPeerGone(f"engine went away during the handshake: {e}") from e
            on_error.pop_all()
        sock.setblocking(False)
        return link

    def close(self) -> None:
        """Stop listening and remove the socket file if it is still ours. Links live on."""
        if self._sock.fileno() >= 0:
            self._sock.close()
            sockpath.unlink(self.path, self._inode)

    def _check_hello(self, sock: socket.socket) -> None:
        hello = sock.recv(handshake.HELLO.size + 1)
        try:
            handshake.check_hello(hello)
        except LinkVersionMismatch:
            sock.send(handshake.welcome(self._memory_bytes))  # without rings: tells our version
            raise

    def _join(self, sock: socket.socket) -> BrokerLink:
        """Make both rings and send their descriptors."""
        with ExitStack() as on_error, ExitStack() as always:
            channels: list[RingChannel] = []
            fds: list[int] = []
            for name in ("requests", "events"):
                memory_fd = _sealed_memory(f"tokenbus-{name}", self._memory_bytes)
                always.callback(os.close, memory_fd)
                bells = (Bell(), Bell())
                for bell in bells:
                    on_error.callback(bell.close)
                channel = RingChannel(memory_fd, *bells, create=True)
                on_error.callback(channel.close)
                channels.append(channel)
                fds += [memory_fd, bells[0].fileno(), bells[1].fileno()]
            socket.send_fds(sock, [handshake.welcome(self._memory_bytes)], fds)
            link = BrokerLink(sock, *channels)
            on_error.pop_all()
            return link


def connect_engine(path: str | Path, timeout_s: float) -> EngineLink:
    """Connect to the broker's socket and open the rings it hands over.

    Tries again until `timeout_s` while nobody listens. Raises LinkUnavailable, LinkPathTooLong,
    LinkRefused, LinkVersionMismatch, LinkPeerGone.
    """
    sock = _connect(Path(path), timeout_s)
    with ExitStack() as on_error:
        on_error.callback(sock.close)
        handshake.check_user(sock)
        sock.settimeout(max(timeout_s, HANDSHAKE_TIMEOUT_S))
        try:
            sock.send(handshake.hello())
            message, fds, flags, _ = socket.recv_fds(
                sock, handshake.WELCOME.size + 1, handshake.NUM_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as e:
            raise LinkUnavailable(f"broker on {path} took the connection but is stuck") from e
        except OSError as e:
            raise LinkPeerGone(f"broker on {path} went away during the handshake: {e}") from e
        link = _open_rings(sock, message, fds, flags)
        on_error.pop_all()
    sock.setblocking(False)
    return link


def _connect(path: Path, timeout_s: float) -> socket.socket:
    """A socket connected to the path, or LinkUnavailable after `timeout_s`."""
    sockpath.check_length(path)
    deadline_s = time.monotonic() + timeout_s
    attempt = 0
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            sock.connect(os.fspath(path))
        except OSError as e:
            sock.close()
            pause_s = _CONNECT_RETRY_S[min(attempt, len(_CONNECT_RETRY_S) - 1)]
            if time.monotonic() + pause_s > deadline_s:
                raise LinkUnavailable(f"no broker on {path} within {timeout_s} s: {e}") from e
            attempt += 1
            time.sleep(pause_s)
        else:
            return sock


def _open_rings(sock: socket.socket, message: bytes, fds: list[int], flags: int) -> EngineLink:
    """The engine's end from the broker's welcome. Owns `fds` from here on."""
    with ExitStack() as on_error, ExitStack() as always:
        for fd in fds:
            on_error.callback(os.close, fd)
        handshake.check_welcome(message, fds, flags)
        channels: list[RingChannel] = []
        bells = [Bell(fd) for at, fd in enumerate(fds) if at % 3]
        memory_fds = fds[::3]
        for memory_fd in memory_fds:
            always.callback(os.close, memory_fd)
        on_error.pop_all()
        for bell in bells:
            on_error.callback(bell.close)
        for at, memory_fd in enumerate(memory_fds):
            channel = RingChannel(memory_fd, bells[2 * at], bells[2 * at + 1], create=False)
            on_error.callback(channel.close)
            channels.append(channel)
        link = EngineLink(sock, *channels)
        on_error.pop_all()
        return link


def _sealed_memory(name: str, size_bytes: int) -> int:
    """A memfd of fixed size: sealed, so that no side can truncate it under the other (SIGBUS)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    return fd
