"""kill -9 of either side of a link, at random points, two hundred times."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ring_peer import RECORD_KIND, is_payload_of, payload_of

from broker.ring.link import BrokerLink, EngineLink, LinkListener, connect_engine
from broker.ring.ring import RingReader, RingWriter

ROOT = Path(__file__).parents[2]
ROUNDS_PER_SIDE = 100
SEED = 20_261_129
RING_BYTES = 1 << 12  # small: the writers are often stopped by a full ring


@pytest.fixture
def fork_peer(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Fork a peer out of one small process; gives its pid."""
    script = Path(__file__).with_name("ring_peer.py")
    zygote = subprocess.Popen(
        [sys.executable, "-S", str(script), "zygote", str(tmp_path / "link")],
        env={"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert zygote.stdin is not None
    assert zygote.stdout is not None

    def fork(role: str) -> int:
        zygote.stdin.write(f"{role}\n".encode())
        zygote.stdin.flush()
        return int(zygote.stdout.readline())

    yield fork
    zygote.stdin.close()
    zygote.stdout.close()
    assert zygote.wait(10) == 0


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))


class Survivor:
    """This process's side: it writes a numbered stream and checks the one that comes."""

    def __init__(self, writer: RingWriter, reader: RingReader) -> None:
        self.writer = writer
        self.reader = reader
        self.sent = self.received = 0

    def work(self, max_records: int) -> None:
        for _ in range(random.randrange(max_records)):
            self.sent += self.writer.try_write(RECORD_KIND, payload_of(self.sent))
        self.drain(random.randrange(1, max_records))

    def drain(self, max_records: int) -> int:
        records = self.reader.read_batch(max_records)
        for _, payload in records:
            assert is_payload_of(self.received, payload), f"record {self.received} is not itself"
            self.received += 1
        return len(records)


def kill_at_a_random_point(link: BrokerLink | EngineLink, survivor: Survivor, pid: int) -> None:
    """Work for a random moment, kill the peer while it works, and read to the clean end."""
    assert survivor.reader.wait(10.0), "the peer wrote nothing"
    end_s = time.monotonic() + random.random() * 0.004
    while time.monotonic() < end_s:
        survivor.work(20)
    assert not link.is_peer_gone()
    os.kill(pid, signal.SIGKILL)
    survivor.work(20)
    poll = select.poll()
    poll.register(link.sock, select.POLLIN)
    assert poll.poll(5000), "no end of file after kill -9"
    assert link.is_peer_gone()
    while survivor.drain(100):
        pass
    assert survivor.reader.read() is None
    assert not survivor.reader.has_records()  # nothing half-written was published
    while survivor.writer.try_write(RECORD_KIND, payload_of(survivor.sent)):
        survivor.sent += 1  # a dead reader makes a full ring, never an error or a wait


def test_the_broker_survives_its_engine_killed_at_random_points(
    tmp_path: Path, fork_peer: Callable[[str], int], open_descriptors: Callable[[], int]
) -> None:
    random.seed(SEED)
    received = 0
    listener = LinkListener(tmp_path / "link", RING_BYTES)
    before = open_descriptors()
    for _ in range(ROUNDS_PER_SIDE):
        pid = fork_peer("engine")
        with listener.accept(10.0) as link:
            assert link.peer_pid == pid
            survivor = Survivor(link.requests, link.events)
            kill_at_a_random_point(link, survivor, pid)
            received += survivor.received
        assert open_descriptors() == before
    listener.close()
    assert received > 10 * ROUNDS_PER_SIDE
    assert "memfd:tokenbus" not in Path("/proc/self/maps").read_text()


def test_the_engine_survives_its_broker_killed_at_random_points(
    tmp_path: Path, fork_peer: Callable[[str], int], open_descriptors: Callable[[], int]
) -> None:
    """Each next broker also has to replace the socket that the killed one left."""
    random.seed(SEED + 1)
    received = 0
    before = open_descriptors()
    for _ in range(ROUNDS_PER_SIDE):
        pid = fork_peer("broker")
        with connect_engine(tmp_path / "link", 10.0) as link:
            assert link.peer_pid == pid
            survivor = Survivor(link.events, link.requests)
            kill_at_a_random_point(link, survivor, pid)
            received += survivor.received
        assert open_descriptors() == before
    assert received > 10 * ROUNDS_PER_SIDE
    assert "memfd:tokenbus" not in Path("/proc/self/maps").read_text()
