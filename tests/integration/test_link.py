"""How a link begins and ends: addresses, users, versions, leftovers, descriptors."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.ring import handshake
from broker.ring.errors import (
    LinkInUse,
    LinkNoResources,
    LinkPathTooLong,
    LinkPathUnsafe,
    LinkPeerGone,
    LinkRefused,
    LinkUnavailable,
    LinkVersionMismatch,
    RingLayoutError,
)
from broker.ring.link import BrokerLink, EngineLink, LinkListener, connect_engine

RING_BYTES = 1 << 16


def open_fds() -> list[str]:
    """What every descriptor of this process points at."""
    targets = [target_of(int(name)) for name in os.listdir("/proc/self/fd")]
    return sorted(target for target in targets if target)


def target_of(fd: int) -> str:
    """What a descriptor points at; empty for the one that listed the directory, closed by now."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def mapped_rings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tokenbus")


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before
    assert mapped_rings() == 0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LinkListener]:
    listener = LinkListener(tmp_path / "link", RING_BYTES)
    yield listener
    listener.close()


def in_thread(function: Callable[[], object]) -> Callable[[], object]:
    """Run a call beside the test; the returned function gives or raises its outcome."""
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(function())
        except Exception as e:  # noqa: BLE001 - handed to the caller
            outcome.append(e)

    thread = threading.Thread(target=body)
    thread.start()

    def join() -> object:
        thread.join(10)
        assert not thread.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return join


def join_pair(listener: LinkListener) -> tuple[BrokerLink, EngineLink]:
    join = in_thread(lambda: connect_engine(listener.path, 5.0))
    broker_link = listener.accept(5.0)
    engine_link = join()
    assert isinstance(engine_link, EngineLink)
    return broker_link, engine_link


def test_records_go_both_ways_and_both_sides_know_each_other(listener: LinkListener) -> None:
    broker_link, engine_link = join_pair(listener)
    with broker_link, engine_link:
        assert broker_link.peer_pid == engine_link.peer_pid == os.getpid()
        assert broker_link.requests.try_write(1, b"request")
        assert engine_link.wait(1.0)
        assert engine_link.requests.read() == (1, b"request")
        assert engine_link.events.try_write(18, b"event")
        assert broker_link.events.wait(1.0)
        assert broker_link.events.read() == (18, b"event")
        assert not broker_link.is_peer_gone()
        assert not engine_link.is_peer_gone()


def test_every_connection_gets_rings_of_its_own(listener: LinkListener) -> None:
    first_broker, first_engine = join_pair(listener)
    second_broker, second_engine = join_pair(listener)
    with first_broker, first_engine, second_broker, second_engine:
        assert first_broker.requests.try_write(1, b"first")
        assert second_engine.requests.read() is None
        assert first_engine.requests.read() == (1, b"first")


def test_what_the_peer_published_before_its_end_can_still_be_read(listener: LinkListener) -> None:
    broker_link, engine_link = join_pair(listener)
    with broker_link:
        assert engine_link.events.try_write(18, b"last words")
        engine_link.close()
        assert broker_link.is_peer_gone()
        assert broker_link.events.read_batch(9) == [(18, b"last words")]
        assert broker_link.events.read() is None


def test_a_waiting_engine_wakes_up_when_the_broker_goes(listener: LinkListener) -> None:
    broker_link, engine_link = join_pair(listener)
    with engine_link:
        join = in_thread(lambda: engine_link.wait(60.0))
        broker_link.close()
        assert join() is False
        assert engine_link.is_peer_gone()


def test_close_may_be_repeated_and_a_closed_link_counts_as_gone(listener: LinkListener) -> None:
    for link in join_pair(listener):
        link.close()
        link.close()
        assert link.is_peer_gone()


def test_ring_memory_cannot_be_truncated_under_the_peer(listener: LinkListener) -> None:
    broker_link, engine_link = join_pair(listener)
    with broker_link, engine_link:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        rings = [fd for fd in fds if "memfd:tokenbus" in target_of(fd)]
        assert rings
        for fd in rings:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 4096)


def test_nobody_on_the_path_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(LinkUnavailable, match="no broker"):
        connect_engine(tmp_path / "link", 0.05)


def test_nobody_connecting_is_unavailable(listener: LinkListener) -> None:
    with pytest.raises(LinkUnavailable, match="no engine"):
        listener.accept(0.01)


def test_the_engine_waits_for_a_broker_that_comes_later(tmp_path: Path) -> None:
    join = in_thread(lambda: connect_engine(tmp_path / "link", 10.0))
    listener = LinkListener(tmp_path / "link", RING_BYTES)
    with listener.accept(10.0):
        engine_link = join()
        assert isinstance(engine_link, EngineLink)
        engine_link.close()
    listener.close()


def test_a_broker_that_takes_no_hello_is_told_apart_from_an_absent_one(
    listener: LinkListener,
) -> None:
    with pytest.raises(LinkUnavailable, match="stuck"):
        connect_engine(listener.path, 0.01)  # in the backlog, never accepted


def test_the_socket_and_its_directory_are_for_this_user_only(tmp_path: Path) -> None:
    listener = LinkListener(tmp_path / "deep" / "run" / "link", RING_BYTES)
    assert stat.S_IMODE((tmp_path / "deep" / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
    listener.close()
    assert not listener.path.exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(LinkPathUnsafe, match="mode 0700"):
        LinkListener(tmp_path / "open" / "link", RING_BYTES)


def test_a_path_too_long_for_a_socket_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 100) / "link"
    with pytest.raises(LinkPathTooLong, match="shorter directory"):
        LinkListener(path, RING_BYTES)
    with pytest.raises(LinkPathTooLong, match="limit is 107"):
        connect_engine(path, 1.0)
    assert not path.parent.exists()


def test_the_longest_path_allowed_works(tmp_path: Path) -> None:
    name = "l" * (107 - len(os.fsencode(tmp_path)) - 1)
    listener = LinkListener(tmp_path / name, RING_BYTES)
    assert len(os.fsencode(tmp_path / name)) == 107
    broker, engine = join_pair(listener)
    assert broker.peer_pid == os.getpid()
    assert not engine.is_peer_gone()
    broker.close()
    assert engine.is_peer_gone()
    engine.close()
    listener.close()


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "link"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    listener = LinkListener(path, RING_BYTES)
    for link in join_pair(listener):
        link.close()
    listener.close()
    assert not path.exists()


def test_a_path_somebody_listens_on_is_in_use_and_stays_usable(listener: LinkListener) -> None:
    with pytest.raises(LinkInUse, match="another process listens"):
        LinkListener(listener.path, RING_BYTES)
    with pytest.raises(LinkPeerGone, match="before its hello"):
        listener.accept(1.0)  # the probe of the second listener
    for link in join_pair(listener):
        link.close()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "link").write_text("precious")
    with pytest.raises(LinkPathUnsafe, match="not a socket"):
        LinkListener(tmp_path / "link", RING_BYTES)
    assert (tmp_path / "link").read_text() == "precious"


def test_close_leaves_a_successor_s_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "link"
    first = LinkListener(path, RING_BYTES)
    path.unlink()
    second = LinkListener(path, RING_BYTES)
    first.close()
    assert path.is_socket()
    second.close()


def test_a_capacity_no_ring_can_have_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RingLayoutError, match="power of two"):
        LinkListener(tmp_path / "run" / "link", 1000)
    assert not (tmp_path / "run").exists()


def raw_peer(listener: LinkListener) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(listener.path))
    return sock


@pytest.mark.parametrize(
    "hello", [b"x", b"TBLE", b"GET / HTTP", b"\0" * 8, b"TBLE\x01\0\0\0extra"], ids=repr
)
def test_a_peer_that_speaks_something_else_is_refused(listener: LinkListener, hello: bytes) -> None:
    with raw_peer(listener) as sock:
        sock.send(hello)
        with pytest.raises(LinkRefused, match="expected a link hello"):
            listener.accept(1.0)
        assert sock.recv(100) == b""
    for link in join_pair(listener):
        link.close()


def test_a_peer_that_says_nothing_does_not_hold_the_broker_up(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.ring.link.HANDSHAKE_TIMEOUT_S", 0.02)
    with raw_peer(listener), pytest.raises(LinkPeerGone, match="timed out"):
        listener.accept(1.0)


def test_another_version_is_refused_and_both_sides_can_say_which(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw_peer(listener) as sock:
        sock.send(handshake.HELLO.pack(handshake.HELLO_MAGIC, 9))
        with pytest.raises(LinkVersionMismatch, match="engine speaks link protocol version 9"):
            listener.accept(1.0)
        answer = sock.recv(100)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 9)
    with pytest.raises(LinkVersionMismatch, match="broker speaks link protocol version 1"):
        handshake.check_welcome(answer, [], 0)


def test_another_user_is_refused(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw_peer(listener) as sock:
        sock.send(handshake.hello())
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(LinkRefused, match=f"runs as user {own}"):
            listener.accept(1.0)


def test_the_engine_refuses_a_welcome_without_all_descriptors(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "link"))
        server.listen()
        join = in_thread(lambda: connect_engine(tmp_path / "link", 5.0))
        peer, _ = server.accept()
        with peer, open(os.devnull) as null:
            socket.send_fds(peer, [handshake.welcome(4096)], [null.fileno()])
            with pytest.raises(LinkRefused, match="expected 6 descriptors with the welcome, got 1"):
                join()


def test_the_engine_refuses_descriptors_that_hold_no_ring(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "link"))
        server.listen()
        join = in_thread(lambda: connect_engine(tmp_path / "link", 5.0))
        peer, _ = server.accept()
        memory_fd = os.memfd_create("other")
        os.ftruncate(memory_fd, 1 << 12)
        with peer:
            socket.send_fds(peer, [handshake.welcome(4096)], [memory_fd] * 6)
            with pytest.raises(RingLayoutError):
                join()
        os.close(memory_fd)


def test_running_out_of_descriptors_fails_one_accept_and_leaks_nothing(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def no_more(initval: int, flags: int) -> int:
        nonlocal calls
        calls += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with raw_peer(listener) as sock:
        sock.send(handshake.hello())
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", no_more)
            with pytest.raises(LinkNoResources, match="Too many open files"):
                listener.accept(1.0)
    assert calls == 1
    for link in join_pair(listener):
        link.close()
