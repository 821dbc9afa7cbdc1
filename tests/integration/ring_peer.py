"""The other process of the ring tests: small, without site-packages, so that it starts in 20 ms.

Run as `python -S ring_peer.py ROLE ...` with PYTHONPATH at the repository root. Every role but
`zygote` exits 0 on success and with a traceback otherwise.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable

from broker.ring import layout, wake
from broker.ring.link import LinkListener, connect_engine
from broker.ring.ring import Ring, RingReader, RingWriter

RECORD_KIND = 16
PATTERN = bytes(range(256)) * 9
#: Two counters whose halves and bytes all differ: any mixture of them is neither.
TORN_A, TORN_B = 0x1111_2222_3333_4444, 0x5555_6666_7777_8888


def payload_of(number: int) -> bytes:
    """Record `number` of a numbered stream: the number, then 0 to 255 bytes that depend on it."""
    size = number * 7919 & 255
    return number.to_bytes(8, "little") + PATTERN[size : size * 2]


def is_payload_of(number: int, payload: bytes) -> bool:
    """Whether the payload is exactly record `number`."""
    return payload == payload_of(number)


def flip_counter(memory_fd: str, method: str) -> None:
    """Store two values by turns into a ring's write counter until killed."""
    memory = mmap.mmap(int(memory_fd), os.fstat(int(memory_fd)).st_size)
    counters = Ring.attach(memory).counters
    at = layout.WRITE_POS_AT
    if method == "cast":
        while True:
            counters[at] = TORN_A
            counters[at] = TORN_B
    pack_into = struct.Struct("<Q").pack_into
    while True:
        pack_into(memory, at * 8, TORN_A)
        pack_into(memory, at * 8, TORN_B)


def soak(path: str, count: str) -> None:
    """Write so many small numbered records of 64 bytes, as fast as the ring takes them."""
    with connect_engine(path, 5.0) as link:
        write, wait = link.events.try_write, link.events.wait
        tail = PATTERN[:56]
        for number in range(int(count)):
            payload = number.to_bytes(8, "little") + tail
            while not write(RECORD_KIND, payload):
                wait(64, 1.0, link.sock.fileno())
        link.requests.wait(60.0, watch_fd=link.sock.fileno())


def echo(path: str, max_poll_ms: str) -> None:
    """Answer every request with itself, asleep in between, until the broker goes."""
    wake.MAX_POLL_MS = int(max_poll_ms)
    with connect_engine(path, 5.0) as link:
        while True:
            if not link.wait(30.0):
                return
            for kind, payload in link.requests.read_batch(100):
                link.events.try_write(kind, payload)


def idle(path: str, seconds: str) -> None:
    """Wait for requests that never come; report the CPU time this took, in seconds."""
    with connect_engine(path, 5.0) as link:
        cpu_s = time.process_time()
        end_s = time.monotonic() + float(seconds)
        while (left_s := end_s - time.monotonic()) > 0:
            link.wait(min(left_s, 0.5))
        cpu_s = time.process_time() - cpu_s
        link.events.try_write(RECORD_KIND, struct.pack("<d", cpu_s))
        link.wait(30.0)


def exchange(writer: RingWriter, reader: RingReader, is_gone: Callable[[], bool]) -> None:
    """Write numbered records and check the ones that come, until the peer is gone."""
    sent = received = 0
    while not is_gone():
        for _ in range(random.randrange(1, 40)):
            sent += writer.try_write(RECORD_KIND, payload_of(sent))
        for _, payload in reader.read_batch(random.randrange(1, 40)):
            assert is_payload_of(received, payload), received
            received += 1


def exchange_as_engine(path: str) -> None:
    with connect_engine(path, 5.0) as link:
        exchange(link.events, link.requests, link.is_peer_gone)


def exchange_as_broker(path: str) -> None:
    listener = LinkListener(path, 1 << 12)
    with listener.accept(5.0) as link:
        exchange(link.requests, link.events, link.is_peer_gone)
    listener.close()


def zygote(path: str) -> None:
    """Fork a child for each line of stdin (`engine` or `broker`) and print its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    roles = {"engine": exchange_as_engine, "broker": exchange_as_broker}
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            roles[line.strip()](path)
            os._exit(0)
        print(pid, flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "flip_counter": flip_counter,
    "soak": soak,
    "echo": echo,
    "idle": idle,
    "zygote": zygote,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
