"""The HTTP server of probes and metrics: pages, addresses, visitors with bad manners."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from broker import http_server
from broker.http_server import MAX_REQUESTS, HttpServer, Page, split_address


def broken() -> Page:
    raise ZeroDivisionError("a bug")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages = {
        "/good": lambda: Page(HTTPStatus.OK, "text/plain", b"good\n"),
        "/bad": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"bad\n"),
        "/broken": broken,
    }
    server = HttpServer("127.0.0.1:0", pages)
    server.start()
    yield server
    server.close()


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/good", (200, b"good\n")),
        ("GET", "/good?a=b", (200, b"good\n")),
        ("HEAD", "/good", (200, b"")),
        ("GET", "/bad", (503, b"bad\n")),
        ("GET", "/", (404, b"There are: /good /bad /broken\n")),
    ],
)
def test_a_path_has_its_page(
    server: HttpServer, method: str, path: str, expected: tuple[int, bytes]
) -> None:
    assert get(server, path, method) == expected


def test_nothing_can_be_changed(server: HttpServer) -> None:
    assert get(server, "/good", "POST")[0] == 501


def test_a_page_that_raises_costs_its_visitor_only(
    server: HttpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        get(server, "/broken")
    assert get(server, "/good")[0] == 200
    assert "http.failed" in "".join(capsys.readouterr())


def test_silent_visitors_are_shown_out(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds every place and says nothing loses it, and others are served again."""
    monkeypatch.setattr(http_server._Handler, "timeout", 0.2)
    host, port = split_address(server.url.removeprefix("http://"))
    silent = [socket.create_connection((host, port)) for _ in range(MAX_REQUESTS)]
    deadline = time.monotonic() + 10
    while True:
        try:
            assert get(server, "/good")[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < deadline
    for connection in silent:
        connection.close()


def test_an_address_that_is_taken_is_an_error(server: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer(server.url.removeprefix("http://"), {})


def test_the_server_stops_while_a_visitor_hangs() -> None:
    server = HttpServer("127.0.0.1:0", {})
    server.start()
    host, port = split_address(server.url.removeprefix("http://"))
    with socket.create_connection((host, port)):
        start_s = time.monotonic()
        server.close()
        assert time.monotonic() - start_s < 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("worker.local:80", ("worker.local", 80)),
    ],
)
def test_addresses_are_read(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", "9464", ":9464", "host:", "host:http", "host:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)


def test_ipv6_loopback_has_brackets_in_its_url() -> None:
    try:
        server = HttpServer("[::1]:0", {})
    except OSError:
        pytest.skip("no IPv6 here")
    assert server.url.startswith("http://[::1]:")
    server.close()
