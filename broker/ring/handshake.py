"""The two messages with which a link begins, and who may send them."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from broker.ring.errors import LinkPeerGone, LinkRefused, LinkVersionMismatch

PROTOCOL_VERSION: Final = 1
NUM_FDS: Final = 6  # two rings of: memory, reader's bell, writer's bell

HELLO_MAGIC: Final = b"TBLE"
WELCOME_MAGIC: Final = b"TBLB"
HELLO: Final = struct.Struct("<4sB3x")
WELCOME: Final = struct.Struct("<4sB3xQ")
_UCRED: Final = struct.Struct("3i")


def hello() -> bytes:
    """The engine's message: magic and version."""
    return HELLO.pack(HELLO_MAGIC, PROTOCOL_VERSION)


def welcome(memory_bytes: int) -> bytes:
    """The broker's message: magic, version, size of each ring's memory."""
    return WELCOME.pack(WELCOME_MAGIC, PROTOCOL_VERSION, memory_bytes)


def check_hello(message: bytes) -> None:
    """Raises LinkPeerGone, LinkRefused or LinkVersionMismatch unless this is an engine's hello."""
    if not message:
        raise LinkPeerGone("engine closed the connection before its hello")
    if len(message) != HELLO.size or message[:4] != HELLO_MAGIC:
        raise LinkRefused(f"expected a link hello of {HELLO.size} bytes, got {message!r}")
    _check_version(message[4], "engine")


def check_welcome(message: bytes, fds: list[int], flags: int) -> None:
    """Raises as `check_hello` unless this is a broker's welcome with all its descriptors.

    flags are recvmsg's: they tell whether the kernel had to leave descriptors out.
    """
    if not message:
        raise LinkPeerGone(
            "broker closed the connection without a welcome; its log says why it refused"
        )
    if len(message) != WELCOME.size or message[:4] != WELCOME_MAGIC:
        raise LinkRefused(f"expected a link welcome of {WELCOME.size} bytes, got {message!r}")
    _check_version(message[4], "broker")
    if flags & socket.MSG_CTRUNC or len(fds) != NUM_FDS:
        raise LinkRefused(
            f"expected {NUM_FDS} descriptors with the welcome, got {len(fds)}; "
            "is the process at its limit of open files (ulimit -n)?"
        )


def _check_version(version: int, peer: str) -> None:
    if version != PROTOCOL_VERSION:
        raise LinkVersionMismatch(
            f"{peer} speaks link protocol version {version}, this side {PROTOCOL_VERSION}; "
            "run broker and engine from the same installation"
        )


def check_user(sock: socket.socket) -> None:
    """Raises LinkRefused unless the peer runs under our user."""
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise LinkRefused(f"peer process {pid} runs as user {uid}, expected user {os.geteuid()}")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid
