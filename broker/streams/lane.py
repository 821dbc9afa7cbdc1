"""One Redis connection: batches of commands out, replies in order, nothing that can be misread.

Knows RESP2 (through hiredis), time limits and errors; knows no key. Replies are matched to their
commands by order alone, and the order is kept by this class, so a task that is cancelled while it
waits cannot make the next one read its reply. A batch that is not answered in time closes the
connection, and everything that waits on it fails with `LinkLost`.

redis-py's asyncio connections are not used here: they await each reply with a timer of its own,
and their built-in retries turn a 3 s limit into 37 s (measured with 8.1 against a stopped server).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import hiredis

from broker.streams.address import Endpoint

Command = Sequence[str | bytes | int]
Reply = Any  # bytes, int, None, a list of replies, or a ReplyError in its place

_pack: Any = hiredis.pack_command  # its stub knows tuples of one only

FENCED_TEXT = "equal or smaller"
# Keys of one job that are not what they should be; others can still be served.
_ABOUT_ONE_JOB = ("WRONGTYPE", "attempt to", "Invalid stream ID")


class LinkLost(Exception):
    """The connection broke or a reply did not come in time; commands may or may not have run."""


class ReplyError(Exception):
    """An error reply. `code` is its first word."""

    @property
    def code(self) -> str:
        """First word of the message, such as NOGROUP."""
        return str(self).split(" ", 1)[0]

    @property
    def is_fenced(self) -> bool:
        """XADD refused an id that is not above the stream's last one."""
        return FENCED_TEXT in str(self)

    @property
    def is_about_one_job(self) -> bool:
        """A key of one job has another type, or holds what no worker has written."""
        return any(words in str(self) for words in _ABOUT_ONE_JOB)

    @property
    def is_no_group(self) -> bool:
        """The stream or its group is gone: Redis lost its data."""
        return "NOGROUP" in str(self) or self.code == "UNBLOCKED"


class Lane(asyncio.Protocol):
    """A connection. `run` may be called from several tasks at once: batches queue up in order."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=ReplyError)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Batch] = deque()

    @classmethod
    async def connect(cls, endpoint: Endpoint, timeout_s: float) -> Lane:
        """Open, authenticate, select the database.

        Raises LinkLost, or ReplyError where the server refuses the credentials.
        """
        loop = asyncio.get_running_loop()

        def make() -> Lane:
            return cls(timeout_s)

        try:
            async with asyncio.timeout(timeout_s):
                if endpoint.path:
                    _, lane = await loop.create_unix_connection(make, endpoint.path)
                else:
                    _, lane = await loop.create_connection(
                        make, endpoint.host, endpoint.port, ssl=endpoint.ssl_context
                    )
        except (OSError, TimeoutError) as error:
            raise LinkLost(f"cannot connect to {endpoint}: {error or 'timed out'}") from error
        try:
            for command in endpoint.hello():
                await lane.call(*command)
        except BaseException:
            lane.close()
            raise
        return lane

    async def run(self, commands: Iterable[Command], timeout_s: float = 0.0) -> list[Reply]:
        """Send a batch in one write and return its replies; an error reply is a ReplyError in the
        list. timeout_s 0: the lane's own. Raises LinkLost.
        """
        packed = [_pack(tuple(command)) for command in commands]
        if not packed:
            return []
        if self._transport is None or self._transport.is_closing():
            raise LinkLost("the connection is closed")
        batch = _Batch(self._loop.create_future(), len(packed))
        self._waiting.append(batch)
        self._transport.write(b"".join(packed))
        timer = self._loop.call_later(timeout_s or self.timeout_s, self._expire, batch)
        batch.future.add_done_callback(lambda _: timer.cancel())
        return await batch.future

    async def call(self, *command: str | bytes | int, timeout_s: float = 0.0) -> Reply:
        """One command. Raises LinkLost or ReplyError."""
        reply = (await self.run((command,), timeout_s))[0]
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def close(self, reason: str = "closed") -> None:
        """Close at once; what waits fails with LinkLost."""
        self._fail(LinkLost(reason))

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        waiting = self._waiting
        try:
            while waiting:
                batch = waiting[0]
                while len(batch.replies) < batch.count:
                    reply = self._reader.gets()
                    if reply is False:
                        return
                    batch.replies.append(reply)
                waiting.popleft()
                if not batch.future.done():  # done: its task was cancelled; the replies are dropped
                    batch.future.set_result(batch.replies)
        except hiredis.ProtocolError as error:
            self._fail(LinkLost(f"not a Redis reply: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(LinkLost(f"connection lost: {exc or 'closed by the server'}"))

    # ------------------------------------------------------------ inside

    def _expire(self, batch: _Batch) -> None:
        self._fail(LinkLost(f"no reply to {batch.count} commands in time"))

    def _fail(self, error: LinkLost) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(error)
        if not self.lost.done():
            self.lost.set_result(None)


class _Batch:
    """Commands sent together and the replies so far."""

    __slots__ = ("count", "future", "replies")

    def __init__(self, future: asyncio.Future[list[Reply]], count: int) -> None:
        self.future = future
        self.count = count
        self.replies: list[Reply] = []
