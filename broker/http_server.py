"""A small HTTP server in a thread of its own, for probes and metrics: GET and HEAD, no state.

Its pages are functions that read numbers and never wait for the event loop, so a slow or wicked
visitor costs the loop nothing but the few milliseconds of a page.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog

log = structlog.get_logger("broker.http")

REQUEST_TIMEOUT_S = 5.0
MAX_REQUESTS = 16  # at once; more are turned away
STOP_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: HTTPStatus
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[], Page]]


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:9464`, `[::1]:9464` or `host:0` -> host and port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class HttpServer:
    """Binds at once; `start` serves. Raises OSError if the address cannot be had."""

    def __init__(self, address: str, pages: Pages) -> None:
        host, port = split_address(address)
        self._server = _Server(host, port, pages)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="http", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens, with the port it got."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if self._server.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}"

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop; takes up to STOP_POLL_S."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a visitor that hangs must not hold up the worker's end

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self.pages = pages
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            reason = f"http {host}:{port}: {error.strerror or error}"
            raise OSError(error.errno, reason) from error

    def server_bind(self) -> None:
        """As in socketserver: http.server's own looks up a host name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: object, client_address: object) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):  # a visitor may go at any time
            log.error("http.failed", error=repr(error), exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "tokenbus"
    sys_version = ""

    def do_GET(self) -> None:
        """One page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Its head."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        render = self.server.pages.get(self.path.partition("?")[0])
        if render is None:
            names = " ".join(self.server.pages)
            page = Page(HTTPStatus.NOT_FOUND, "text/plain", f"There are: {names}\n".encode())
        else:
            page = render()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it
        """Probes come every few seconds; they are not worth a line."""
