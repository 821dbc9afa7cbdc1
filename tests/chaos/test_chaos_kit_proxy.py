"""The fault proxy does what it says, or the chaos tests prove nothing."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from ops.bench.chaos_framing import Framer, RawFramer, RespFramer, ZmtpFramer
from ops.bench.chaos_proxy import TcpProxy


class EchoHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            while data := self.request.recv(65536):
                self.request.sendall(data)
        except ConnectionError:
            return


@pytest.fixture
def echo_port() -> Iterator[int]:
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), EchoHandler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo_port: int) -> Iterator[TcpProxy]:
    with TcpProxy(("127.0.0.1", echo_port)) as proxy:
        yield proxy


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def receive(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (more := client.recv(size - len(got))):
        got += more
    return got


def end_of(proxy: TcpProxy, client: socket.socket | None = None) -> str:
    """How a connection (a new one by default) ends for the client: `reset`, `end` or `data`."""
    try:
        with client or connect(proxy) as sock:
            return "data" if sock.recv(1) else "end"
    except ConnectionError:
        return "reset"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_without_faults_everything_passes_both_ways(proxy: TcpProxy) -> None:
    data = bytes(range(256)) * 4000
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert receive(client, len(data)) == data
        sender.join()


def test_an_orderly_end_passes_too(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"last")
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 100) == b"last"


@pytest.mark.parametrize("direction", ["up", "down"])
def test_delay_makes_frames_late_and_heal_ends_it(proxy: TcpProxy, direction: str) -> None:
    with connect(proxy) as client:
        proxy.delay(getattr(proxy, direction), 0.15)
        start_s = time.monotonic()
        assert ask(client, b"x") == b"x"
        assert time.monotonic() - start_s >= 0.15
        proxy.heal()
        assert ask(client, b"y") == b"y"


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_stall_holds_bytes_until_it_heals(proxy: TcpProxy, direction: str) -> None:
    with connect(proxy) as client:
        proxy.stall(getattr(proxy, direction))
        client.sendall(b"held")
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(10)
        proxy.heal()
        assert receive(client, 4) == b"held"


def test_a_stall_of_one_direction_leaves_the_other(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"warm") == b"warm"
        frames_up = proxy.up.frames
        proxy.stall(proxy.down)
        client.sendall(b"there")
        wait_until(lambda: proxy.up.frames > frames_up)
        assert proxy.down.frames == 1


def test_swallowed_bytes_never_come_and_heal_cuts_the_connection(proxy: TcpProxy) -> None:
    with connect(proxy) as client, connect(proxy) as unhurt:
        assert ask(unhurt, b"x") == b"x"
        proxy.swallow(proxy.up)
        client.sendall(b"lost")
        wait_until(lambda: proxy.up.swallowed > 0)
        proxy.heal()
        assert end_of(proxy, client) == "reset"
        assert ask(unhurt, b"y") == b"y"


def test_cut_resets_what_is_open_and_new_connections_work(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.cut()
        assert end_of(proxy, client) == "reset"
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"


@pytest.mark.parametrize(("after", "expected"), [(True, b"one two"), (False, b"one ")])
def test_a_cut_hits_at_the_frame_that_matches_before_or_after_it(
    proxy: TcpProxy, after: bool, expected: bytes
) -> None:
    with connect(proxy) as client:
        proxy.cut_at(proxy.down, lambda frame: b"two" in frame, after=after)
        assert ask(client, b"one ") == b"one "
        client.sendall(b"two")
        assert b"one " + receive(client, 100) == expected
        assert proxy.cuts == 1
    with connect(proxy) as client:
        assert ask(client, b"two") == b"two"  # a cut happens once


def test_refuse_resets_new_connections_until_heal(proxy: TcpProxy) -> None:
    proxy.refuse()
    assert end_of(proxy) == "reset"
    proxy.heal()
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"


def test_an_absent_server_looks_like_one_to_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with TcpProxy(("127.0.0.1", port)) as proxy:
        assert end_of(proxy) == "reset"


def test_close_may_be_repeated_and_leaves_no_thread(echo_port: int) -> None:
    before = threading.active_count()
    proxy = TcpProxy(("127.0.0.1", echo_port))
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.close()
        proxy.close()
    assert threading.active_count() <= before + 1  # the echo server's own for this connection


def test_zmq_messages_are_frames_of_their_own() -> None:
    """The fifth message is cut off exactly, and the four before it have arrived."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as sink,
        context.socket(zmq.PUSH) as source,
    ):
        port = sink.bind_to_random_port("tcp://127.0.0.1")
        sink.rcvtimeo = 10_000
        source.linger = 0
        with TcpProxy(("127.0.0.1", port), ZmtpFramer) as proxy:
            proxy.cut_at(proxy.up, lambda frame: frame.endswith(b"4"), after=False)
            source.connect(f"tcp://127.0.0.1:{proxy.port}")
            for number in range(5):
                source.send(b"x" * (number * 150) + str(number).encode())
            assert [sink.recv()[-1:] for _ in range(4)] == [b"0", b"1", b"2", b"3"]
            deadline_s = time.monotonic() + 10.0  # the fifth comes to the proxy in its own time
            while proxy.cuts == 0 and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert proxy.cuts == 1


RESP_FRAMES = [
    b"+OK\r\n",
    b":12\r\n",
    b"$5\r\nhe\r\no\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n",
    b"*2\r\n*2\r\n:1\r\n$2\r\nab\r\n+x\r\n",
    b"%1\r\n+k\r\n*1\r\n:1\r\n",
    b"_\r\n",
    b"#t\r\n",
    b"-ERR no\r\n",
]
ZMTP_FRAMES = [
    b"\x04\x03abc",
    b"\x00\x00",
    b"\x02" + b"\0" * 6 + b"\x01\x00" + b"z" * 256,
]


@pytest.mark.parametrize(
    ("make", "frames"), [(RespFramer, RESP_FRAMES), (ZmtpFramer, ZMTP_FRAMES)], ids=["resp", "zmtp"]
)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_a_framer_finds_the_same_frames_however_the_bytes_arrive(
    make: type[Framer], frames: list[bytes], step: int
) -> None:
    stream = b"".join(frames)
    framer = make()
    if make is ZmtpFramer:
        list(framer.feed(b"g" * 64))
    found = [
        frame for at in range(0, len(stream), step) for frame in framer.feed(stream[at : at + step])
    ]
    assert found == frames


def test_a_zmtp_greeting_is_not_held_until_it_is_whole() -> None:
    framer = ZmtpFramer()
    assert list(framer.feed(b"s" * 10)) == [b"s" * 10]
    assert list(framer.feed(b"g" * 54 + b"\x04\x01a\x00")) == [b"g" * 54, b"\x04\x01a"]


def test_a_raw_framer_passes_each_read() -> None:
    assert list(RawFramer().feed(b"abc")) == [b"abc"]
