"""Both ends of the channels that `ops.bench.ring` compares, and what the far end does.

A module of its own, so that a spawned process finds it however the benchmark was started.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, Final, Protocol

import zmq

from broker.ring.link import connect_engine

MESSAGE_BYTES: Final = 64
KIND: Final = 16

# A message starts with a u64: one of these, or the monotonic time in ns at which it was sent.
ECHO_WORD, COUNT_WORD, STOP_WORD, FILL_WORD = range(4)


def message_of(word: int) -> bytes:
    """A message of 64 bytes that starts with this word."""
    return word.to_bytes(8, "little") + b"x" * (MESSAGE_BYTES - 8)


ECHO: Final = message_of(ECHO_WORD)
FILL: Final = message_of(FILL_WORD)


class Channel(Protocol):
    """One side of a two-way connection."""

    def send(self, message: bytes) -> None:
        """Hand one message over; waits while the other side is full."""

    def receive(self) -> list[bytes]:
        """Wait for at least one message; all that are there at once."""


class RingChannel:
    """Our ring, spinning for up to `spin_s` before it sleeps."""

    def __init__(self, link: Any, is_engine: bool, spin_s: float) -> None:
        self._writer = link.events if is_engine else link.requests
        self._reader = link.requests if is_engine else link.events
        self._spin_s = spin_s

    def send(self, message: bytes) -> None:
        while not self._writer.try_write(KIND, message):
            self._writer.wait(len(message), 1.0)

    def receive(self) -> list[bytes]:
        while not (records := self._reader.read_batch(256)):
            self._reader.wait(60.0, self._spin_s)
        return [payload for _, payload in records]


class ZmqChannel:
    """A pyzmq socket."""

    def __init__(self, sock: zmq.SyncSocket) -> None:
        self._sock = sock

    def send(self, message: bytes) -> None:
        self._sock.send(message, copy=True)

    def receive(self) -> list[bytes]:
        return [self._sock.recv()]


class QueueChannel:
    """A pair of multiprocessing.Queue."""

    def __init__(self, outbound: Any, inbound: Any) -> None:
        self._outbound = outbound
        self._inbound = inbound

    def send(self, message: bytes) -> None:
        self._outbound.put(message)

    def receive(self) -> list[bytes]:
        return [self._inbound.get()]


def serve(channel: Channel) -> None:
    """The other process, until told to stop.

    ECHO comes back; FILL is counted; COUNT is answered with that count; a timed message adds its
    delay to a list; STOP is answered with the list's [p50, p99] in ns, as JSON.
    """
    delays_ns: list[int] = []
    count = 0
    while True:
        for message in channel.receive():
            word = int.from_bytes(message[:8], "little")
            if word > FILL_WORD:
                delays_ns.append(time.monotonic_ns() - word)
            elif word == FILL_WORD:
                count += 1
            elif word == ECHO_WORD:
                channel.send(message)
            elif word == COUNT_WORD:
                channel.send(count.to_bytes(8, "little"))
                count = 0
            else:
                delays_ns.sort()
                channel.send(json.dumps([percentile(delays_ns, q) for q in (50, 99)]).encode())
                return


def serve_ring(path: str, spin_s: float, cpus: set[int]) -> None:
    """`serve` at the engine's end of a link, on these CPUs."""
    os.sched_setaffinity(0, cpus)
    with connect_engine(path, 30.0) as link:
        serve(RingChannel(link, True, spin_s))
        link.wait(30.0)  # until the other side has read the answer and closed


def serve_zmq(endpoint: str) -> None:
    """`serve` on a DEALER socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.connect(endpoint)
        serve(ZmqChannel(sock))


def serve_queue(inbound: Any, outbound: Any) -> None:
    """`serve` on two queues."""
    serve(QueueChannel(outbound, inbound))


def percentile(ordered: list[int], percent: int) -> float:
    """Nearest-rank percentile of sorted values; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]
