"""The ROUTER socket on the broker's loop: a plain socket, polled through its descriptor.

Plain sockets receive 3-4 times what zmq.asyncio does. The descriptor is edge-triggered, and a send
can consume its edge: so it is read until nothing is left, and looked at again after every burst of
sends. Sends never block: a peer that takes no more is FULL, one that is not there is GONE, and
nothing is dropped in silence.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from enum import Enum

import zmq

from broker.config import ZmqConfig
from broker.gateway.security import Curve, ZapHandler
from tokenbus.parts import receive_frames, receive_parts, send_parts

BURST_MESSAGES = 64  # then the loop gets a turn
HARD_CAP_FACTOR = 4  # libzmq cuts the connection without a word above this many max_frame_bytes
HIGH_WATER_MESSAGES = 1_000
LINGER_MS = 2_000

# As plain integers: an enum's operators cost more than what is asked with them.
_POLLIN, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)


class Sent(Enum):
    """What became of a message."""

    OK = "ok"
    FULL = "full"  # the peer's queue is full; nothing was kept
    GONE = "gone"  # no such peer (any more)


Receive = Callable[[bytes, list[bytes], bytes], None]


class Router:
    """`receive(peer, frames, key)` is called for each message; key: the client's CURVE public key
    in Z85, b"" in clear text. It must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ZmqConfig, curve: Curve | None):
        self._loop = loop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = ZapHandler(self._context, curve) if curve else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._has_keys = curve is not None
        self._is_scheduled = False
        self._receive: Receive = _ignore
        self._on_readable: Callable[[], None] = self._read
        self._configure(config, curve)
        self._socket.bind(_with_free_port(config.endpoint))
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))

    def start(
        self, receive: Receive, guard: Callable[[Callable[..., None]], Callable[..., None]]
    ) -> None:
        """Begin to receive; guard wraps what the loop calls."""
        self._receive = receive
        self._on_readable = guard(self._read)
        self._loop.add_reader(self._fd, self._on_readable)
        if self._zap is not None:
            self._loop.add_reader(self._zap.fileno(), guard(self._zap.answer_all))
            self._zap.answer_all()
        self.look_again()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        """Send one message now or not at all. The frames must be immutable."""
        try:
            send_parts(self._socket, (peer, *frames))
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, zmq.EHOSTUNREACH):
                return Sent.GONE
            raise
        self.look_again()
        return Sent.OK

    def look_again(self) -> None:
        """Something may have arrived without an edge: look in the loop's next turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def close(self) -> None:
        """Stop receiving; what was sent has LINGER_MS to leave."""
        self._loop.remove_reader(self._fd)
        if self._zap is not None:
            self._loop.remove_reader(self._zap.fileno())
            self._zap.close()
        self._socket.close()
        self._context.term()

    def _look(self) -> None:
        self._is_scheduled = False
        if not self._socket.closed and self._has_message():
            self._on_readable()

    def _has_message(self) -> bool:
        """Cheaper than the exception of a receive in vain."""
        return bool(self._socket.get(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def _read(self) -> None:
        """Called when something should be there."""
        receive = self._receive
        for _ in range(BURST_MESSAGES):
            try:
                peer, frames, key = self._take()
            except zmq.Again:
                return
            receive(peer, frames, key)
            if not self._has_message():
                return
        self.look_again()

    def _take(self) -> tuple[bytes, list[bytes], bytes]:
        if not self._has_keys:
            peer, *frames = receive_parts(self._socket)
            return peer, frames, b""
        first, *rest = receive_frames(self._socket)
        key = str((rest or [first])[-1].get("User-Id")).encode()
        return first.bytes, [frame.bytes for frame in rest], key

    def _configure(self, config: ZmqConfig, curve: Curve | None) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, HARD_CAP_FACTOR * config.max_frame_bytes)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, config.heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * config.heartbeat_ms)
        socket.setsockopt(zmq.IPV6, 1 if "[" in config.endpoint else 0)
        if curve is not None:
            socket.curve_server = True
            socket.curve_publickey = curve.public_key
            socket.curve_secretkey = curve.secret_key


def _with_free_port(endpoint: str) -> str:
    return endpoint[:-2] + ":*" if endpoint.endswith(":0") else endpoint


def _ignore(peer: bytes, frames: list[bytes], key: bytes) -> None:
    """Before `start` nothing is received."""
