"""A ROUTER that a test scripts message by message: the worker's side, without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from tokenbus.bodies import Accepted, Welcome, done_to_body, error_to_body, tokens_to_body
from tokenbus.errors import NoSession, TokenbusError
from tokenbus.events import Done, Reason, Tokens, Usage, crc32_of_ids
from tokenbus.protocol import Message, MessageType, decode, encode


class FakeWorker:
    """Binds a ROUTER on a free port. `expect` answers HELLO and PING on its way.

    greets: False leaves HELLO unanswered. All helpers send to the peer that was heard last.
    """

    def __init__(self, boot: str = "boot-1", heartbeat_ms: int = 2_000, port: int = 0) -> None:
        self.boot = boot
        self.heartbeat_ms = heartbeat_ms
        self.greets = True
        self.hellos: list[Message] = []
        self.credits: list[int] = []
        self.heard: list[MessageType] = []
        self.peer = b""
        self._greeted: set[bytes] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if port:
            self._socket.bind(f"tcp://127.0.0.1:{port}")
            self.port = port
        else:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeWorker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Gone, as with kill -9."""
        self._context.destroy(linger=0)

    async def receive(self) -> Message:
        """The next message, whatever it is."""
        peer, *frames = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        self.peer = peer
        message = decode(frames)
        self.heard.append(message.type)
        return message

    async def expect(self, kind: MessageType) -> Message:
        """The next message of a kind; HELLO, PING and CREDIT before it are dealt with."""
        while True:
            message = await self.receive()
            if message.type is MessageType.HELLO:
                self.hellos.append(message)
                self._greeted.add(self.peer)
                if self.greets:
                    await self.welcome()
            elif self.peer not in self._greeted:  # ZeroMQ reconnected to a worker that is new
                await self.error(NoSession("say HELLO"))
                continue
            elif message.type is MessageType.PING:
                await self.send(MessageType.PONG, {"t": message.body["t"]})
            elif message.type is MessageType.CREDIT:
                self.credits.append(message.body["total"])
            if message.type is kind:
                return message

    async def settle(self) -> None:
        """Return when the client has everything that was sent."""
        await self.send(MessageType.PING, {"t": 1})
        await self.expect(MessageType.PONG)

    async def welcome(self) -> None:
        """Answer a HELLO."""
        welcome = Welcome("fake", self.boot, "default", ("m",), self.heartbeat_ms, 60_000)
        await self.send(MessageType.WELCOME, welcome.to_body())

    async def send(self, kind: MessageType, body: dict[str, Any]) -> None:
        """One message to the last peer."""
        await self.send_frames(encode(kind, body))

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        """Raw frames to the last peer."""
        await self._socket.send_multipart([self.peer, *frames])

    async def accept(self, job: str, *, seed: int = 7, seq: int = 0) -> None:
        """ACCEPTED."""
        await self.send(MessageType.ACCEPTED, Accepted(job, 1, seed, 3, seq).to_body())

    async def tokens(self, *events: tuple[str, int, list[int], str], attempt: int = 1) -> None:
        """TOKENS with (job, seq, ids, text) events."""
        rows = [Tokens(job, attempt, seq, tuple(ids), text) for job, seq, ids, text in events]
        await self.send(MessageType.TOKENS, tokens_to_body(rows))

    async def done(
        self,
        job: str,
        ids: Sequence[int],
        *,
        text: str = "",
        reason: Reason = "stop",
        crc: int | None = None,
    ) -> None:
        """DONE after these ids."""
        crc = crc32_of_ids(ids) if crc is None else crc
        done = Done(job, 1, len(ids), reason, text, Usage(3, len(ids)), crc)
        await self.send(MessageType.DONE, done_to_body(done))

    async def error(self, error: TokenbusError, **where: object) -> None:
        """ERROR."""
        await self.send(MessageType.ERROR, error_to_body(error, **where))


class Cuttable:
    """A way to a worker's port that a test can cut, as a firewall or a cable would."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.endpoint = ""

    async def __aenter__(self) -> Cuttable:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection; new ones may come."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, far_writer}
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end is gone."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except OSError:
        return
    finally:
        writer.close()
