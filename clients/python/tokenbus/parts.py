"""Messages of several parts over a plain socket, in as few calls as there are parts.

pyzmq's own `send_multipart` and `recv_multipart` take three times as long: an enum's operators for
the flags of each part, and a question to the socket after each. That is most of what a small
message costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

WAIT = 0
NOW = int(zmq.DONTWAIT)
_MORE = int(zmq.SNDMORE)


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[bytes], flags: int = NOW) -> None:
    """Send one message of at least one part, which must be immutable. Raises zmq.Again, before
    anything was sent, where it would have to wait and flags are NOW.
    """
    send = socket.send
    more = flags | _MORE
    for part in parts[:-1]:
        send(part, more)
    send(parts[-1], flags)


def receive_frames(socket: zmq.Socket[bytes], flags: int = NOW) -> list[zmq.Frame]:
    """The next message, as it came. Raises zmq.Again if there is none and flags are NOW."""
    receive = socket.recv
    frame = receive(flags, False)
    frames = [frame]
    while frame.more:
        frame = receive(flags, False)
        frames.append(frame)
    return frames


def receive_parts(socket: zmq.Socket[bytes], flags: int = NOW) -> list[bytes]:
    """The same as bytes."""
    return [frame.bytes for frame in receive_frames(socket, flags)]
