"""One connection to a worker: HELLO and WELCOME, heartbeats, credit. Knows nothing of jobs.

closed --open--> greeting --WELCOME--> live --silence or version error--> lost
                     ^                  | ERROR no_session, or connected again after a break:
                     +------------------+ HELLO again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import zmq

from tokenbus.bodies import Hello, Welcome, error_from_body
from tokenbus.dealer import CurveKeys, Dealer
from tokenbus.errors import (
    BadFrame,
    BusUnavailable,
    NoSession,
    TokenbusError,
    Unsupported,
    VersionMismatch,
)
from tokenbus.protocol import Limits, Message, MessageType, decode, encode

LIVENESS = 3  # heartbeats without a sign of life
_CHECKED_LATER = frozenset({MessageType.TOKENS})
_INCOMING = Limits(max_body_bytes=16 << 20)  # a worker's message is bounded by our credit


class ZmqSession:
    """`on_welcome` is called for every WELCOME, `on_message` for what concerns jobs.

    lost: resolved with the reason when the connection is given up.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        hello: Hello,
        on_welcome: Callable[[Welcome], None],
        on_message: Callable[[Message], None],
        curve: CurveKeys | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._endpoint = endpoint
        self._heartbeat_s = 2.0
        self._limits = Limits()
        self._granted = self._received = 0
        self._last_sent_s = self._last_heard_s = self._hello_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_live = False
        self._was_cut = False
        self.lost: asyncio.Future[TokenbusError] = self._loop.create_future()
        self._dealer = Dealer(context, endpoint, self._on_frames, self._on_connection, curve)

    @property
    def is_live(self) -> bool:
        """WELCOME came and the connection was not given up."""
        return self._is_live and not self.lost.done()

    def open(self, timeout_s: float) -> None:
        """Say HELLO; without WELCOME in time the session is lost."""
        self._say_hello()
        self._timer = self._loop.call_later(timeout_s, self._on_greeting_timeout)

    def send(
        self, kind: MessageType, body: Mapping[str, object], blobs: Sequence[bytes] = ()
    ) -> None:
        """Send one message. Raises TooLarge over the worker's limits, BusUnavailable when it takes
        nothing.
        """
        if not self._dealer.send(encode(kind, body, blobs, self._limits)):
            raise BusUnavailable(f"{self._endpoint} takes no more messages")
        self._last_sent_s = self._loop.time()

    def use_credit(self, num_events: int) -> None:
        """Count TOKENS events that came; grant more when half of the window is used."""
        self._received += num_events
        if self._granted - self._received <= self._hello.credit // 2:
            self._granted = self._received + self._hello.credit
            self.send(MessageType.CREDIT, {"total": self._granted})

    def close(self) -> None:
        """Free the socket."""
        self._is_live = False
        if self._timer is not None:
            self._timer.cancel()
        self._dealer.close()
        if not self.lost.done():
            self.lost.cancel()

    def _say_hello(self) -> None:
        self._is_live = False
        self._hello_s = self._loop.time()
        self._granted, self._received = self._hello.credit, 0
        self.send(MessageType.HELLO, self._hello.to_body())

    def _lose(self, error: TokenbusError) -> None:
        self._is_live = False
        if not self.lost.done():
            self.lost.set_result(error)

    def _on_greeting_timeout(self) -> None:
        self._lose(BusUnavailable(f"no worker answers at {self._endpoint}"))

    def _on_heartbeat(self) -> None:
        now_s = self._loop.time()
        if now_s - self._last_heard_s > LIVENESS * self._heartbeat_s:
            self._lose(BusUnavailable(f"the worker at {self._endpoint} went silent"))
            return
        if now_s - self._last_sent_s >= self._heartbeat_s * 0.9:
            self.send(MessageType.PING, {"t": int(now_s * 1_000)})
        self._timer = self._loop.call_later(self._heartbeat_s / 2, self._on_heartbeat)

    def _on_connection(self, is_up: bool) -> None:
        """A new connection has no session yet. It is not waited for: the heartbeats go on."""
        if not is_up:
            self._is_live = False
            self._was_cut = True
        elif self._was_cut and not self.lost.done():
            self._was_cut = False
            try:
                self._say_hello()
            except BusUnavailable as error:
                self._lose(error)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._last_heard_s = self._loop.time()
        try:
            self._on_decoded(decode(frames, _INCOMING, _CHECKED_LATER))
        except Unsupported:
            return  # a message type of a later minor version
        except (BadFrame, VersionMismatch) as error:
            self._lose(BusUnavailable(f"{self._endpoint} speaks another protocol: {error}"))
        except BusUnavailable as error:  # an answer could not be queued
            self._lose(error)

    def _on_decoded(self, message: Message) -> None:
        kind, body = message.type, message.body
        if kind is MessageType.WELCOME:
            self._on_welcome_body(Welcome.from_body(body))
        elif kind is MessageType.PING:
            self.send(MessageType.PONG, {"t": body.get("t", 0)})
        elif kind is MessageType.ERROR and "job" not in body:
            self._on_own_error(error_from_body(body))
        elif kind is not MessageType.PONG:
            self._on_message(message)

    def _on_own_error(self, error: TokenbusError) -> None:
        """An error about a message of ours, not about a job."""
        if isinstance(error, NoSession):
            # Several messages may have met a new worker: one HELLO answers them all. But the worker
            # may have died with that HELLO: then the next heartbeat learns it.
            if self._is_live or self._loop.time() - self._hello_s > self._heartbeat_s / 2:
                self._say_hello()
        elif isinstance(error, VersionMismatch) or not self._is_live:
            self._lose(error)

    def _on_welcome_body(self, welcome: Welcome) -> None:
        self._is_live = True
        self._heartbeat_s = welcome.heartbeat_ms / 1_000
        self._limits = welcome.limits
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._heartbeat_s / 2, self._on_heartbeat)
        self._on_welcome(welcome)
