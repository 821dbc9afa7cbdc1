"""Learns at once when the connection under a ZeroMQ socket breaks, and when it is back.

ZeroMQ connects again by itself and says nothing of it; only a monitor of the socket hears it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import zmq

from tokenbus.parts import receive_parts

_UP, _DOWN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_NUMBER = struct.Struct("=H")  # of the event, first in its first frame


class ConnectionWatch:
    """on_change(is_up) is called on the loop, for each change in order; it must not raise."""

    def __init__(self, socket: zmq.Socket[bytes], on_change: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._watched = socket
        self._monitor = socket.get_monitor_socket(_UP | _DOWN)
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def close(self) -> None:
        """Hear nothing more. Before the socket itself is closed."""
        self._loop.remove_reader(self._fd)
        self._watched.disable_monitor()
        self._monitor.close(0)

    def _read(self) -> None:
        """The descriptor is edge-triggered: until nothing is left."""
        while not self._monitor.closed:
            try:
                head = receive_parts(self._monitor)[0]
            except zmq.Again:
                return
            self._on_change(_NUMBER.unpack_from(head)[0] == _UP)
