"""The ring between two real processes: tearing, lost wake-ups, ten million records, idle cost."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ring_peer import PATTERN, RECORD_KIND, TORN_A, TORN_B

from broker.ring import layout, wake
from broker.ring.link import BrokerLink, LinkListener
from broker.ring.ring import Ring

ROOT = Path(__file__).parents[2]
Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start ring_peer.py in a role; whatever still runs at the end of the test is killed."""
    peers: list[subprocess.Popen[bytes]] = []

    def start(*args: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", str(Path(__file__).with_name("ring_peer.py"))]
        peer = subprocess.Popen(
            [*command, *map(str, args)], env={"PYTHONPATH": str(ROOT)}, pass_fds=pass_fds
        )
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        peer.kill()
        peer.wait()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LinkListener]:
    listener = LinkListener(tmp_path / "link", 1 << 20)
    yield listener
    listener.close()


def values_seen(spawn: Spawn, method: str, is_enough: Callable[[set[int], int], bool]) -> set[int]:
    """The distinct values of a counter that another process flips between two, until enough."""
    fd = os.memfd_create("ring-test")
    os.ftruncate(fd, layout.memory_bytes(64))
    memory = mmap.mmap(fd, layout.memory_bytes(64))
    ring = Ring.create(memory)
    counters, at = ring.counters, layout.WRITE_POS_AT
    peer = spawn("flip_counter", fd, method, pass_fds=(fd,))
    os.close(fd)
    while counters[at] == 0:
        assert peer.poll() is None
    seen: set[int] = set()
    rounds = 0
    while not is_enough(seen, rounds):
        seen.update([counters[at] for _ in range(10_000)])
        rounds += 1
    peer.kill()
    ring.release()
    memory.close()
    return seen


def test_a_counter_stored_by_cast_is_never_seen_torn(spawn: Spawn) -> None:
    seen = values_seen(spawn, "cast", lambda _, rounds: rounds >= 300)
    assert seen == {TORN_A, TORN_B}


def test_the_torn_counter_test_sees_the_zero_that_pack_into_writes_first(spawn: Spawn) -> None:
    seen = values_seen(spawn, "pack_into", lambda seen, rounds: 0 in seen or rounds >= 1000)
    assert 0 in seen


def test_no_wake_up_is_lost_without_the_poll_cap_to_help(
    spawn: Spawn, listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides sleep between records and poll for up to 20 s, so one lost wake-up is seen.

    The writer comes after a delay that sweeps over the time in which the reader falls asleep.
    """
    monkeypatch.setattr(wake, "MAX_POLL_MS", 20_000)
    spawn("echo", listener.path, 20_000)
    with listener.accept(10.0) as link:
        for number in range(5_000):
            delay_ns = number % 101 * 1_000
            end_ns = time.perf_counter_ns() + delay_ns
            while time.perf_counter_ns() < end_ns:
                pass
            payload = number.to_bytes(8, "little")
            assert link.requests.try_write(1, payload)
            assert link.events.wait(10.0), f"wake-up lost in round {number}"
            assert link.events.read() == (1, payload)


def read_stream(link: BrokerLink, count: int) -> None:
    """Check that exactly `count` numbered records come, in order and whole."""
    tail = PATTERN[:56]
    number = 0
    while number < count:
        records = link.events.read_batch(512)
        if not records:
            assert link.events.wait(10.0, watch_fd=link.sock.fileno()), f"stuck after {number}"
            continue
        expected = [
            (RECORD_KIND, n.to_bytes(8, "little") + tail)
            for n in range(number, number + len(records))
        ]
        assert records == expected
        number += len(records)
    assert not link.events.has_records()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_million_records_arrive_in_order_and_whole(
    spawn: Spawn, listener: LinkListener
) -> None:
    count = int(os.environ.get("TOKENBUS_TEST_RING_RECORDS", "10000000"))
    peer = spawn("soak", listener.path, count)
    with listener.accept(10.0) as link:
        read_stream(link, count)
    assert peer.wait(10) == 0


def test_an_idle_reader_costs_less_than_one_percent_of_a_core(
    spawn: Spawn, listener: LinkListener
) -> None:
    seconds = 2.0
    spawn("idle", listener.path, seconds)
    with listener.accept(10.0) as link:
        assert link.events.wait(seconds + 10)
        record = link.events.read()
    assert record is not None
    (cpu_s,) = struct.unpack("<d", record[1])
    assert cpu_s < 0.01 * seconds
