"""A DEALER that speaks the protocol frame by frame, for tests that a well-behaved client cannot
write.
"""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import zmq
import zmq.asyncio

from tokenbus.protocol import Limits, Message, MessageType, decode, encode_trusted

ANSWER_S = 20.0
LOOSE = Limits(max_body_bytes=64 << 20)


@dataclass
class Reply:
    """One job as its messages told it."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    accepted: dict[str, Any] | None = None
    end: Message | None = None
    num_events: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """Of the terminal message."""
        assert self.end is not None
        return self.end.body


class RawClient:
    """One connection. `name` is the client's name in HELLO."""

    def __init__(self, endpoint: str, name: str | None = None) -> None:
        self.name = name or f"test-{uuid.uuid4().hex}"
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self._endpoint = endpoint
        self.messages: list[Message] = []  # everything received
        self.largest_bytes = 0  # of the bodies received

    async def __aenter__(self) -> Self:
        self.socket.connect(self._endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gone without a word."""
        self.socket.close()
        self._context.term()

    async def hello(self, credit: int = 100_000, **fields: Any) -> dict[str, Any]:
        """Say HELLO; returns WELCOME's body."""
        await self.send(MessageType.HELLO, client=self.name, credit=credit, **fields)
        return (await self.receive(MessageType.WELCOME)).body

    async def send(self, kind: MessageType, blobs: Sequence[bytes] = (), **body: Any) -> None:
        """Send one message."""
        await self.send_frames([*encode_trusted(kind, body), *blobs])

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send anything."""
        await self.socket.send_multipart(frames)

    async def next(self, timeout_s: float = ANSWER_S) -> Message:
        """The next message, whatever it is; a PING is answered."""
        frames = await asyncio.wait_for(self.socket.recv_multipart(), timeout_s)
        message = decode(frames, LOOSE)
        self.messages.append(message)
        self.largest_bytes = max(self.largest_bytes, len(frames[1]))
        if message.type is MessageType.PING:
            await self.send(MessageType.PONG, t=message.body["t"])
        return message

    async def receive(self, *kinds: MessageType, job: str | None = None) -> Message:
        """The next message of these kinds (and this job); others are passed over."""
        while True:
            message = await self.next()
            if message.type in kinds and (job is None or message.body.get("job") == job):
                return message

    async def submit(self, job: str | None = None, **body: Any) -> str:
        """Send SUBMIT; returns the job's id."""
        job = job or uuid.uuid4().hex
        blobs = body.pop("blobs", ())
        await self.send(MessageType.SUBMIT, blobs, job=job, **body)
        return job

    async def collect(self, *jobs: str) -> dict[str, Reply]:
        """Read until each of these jobs has ended (or was rejected). Checks that seqs fit."""
        replies = {job: Reply() for job in jobs}
        while any(reply.end is None for reply in replies.values()):
            take(replies, await self.next())
        return replies

    async def run(self, **body: Any) -> Reply:
        """SUBMIT, and everything until its end."""
        job = await self.submit(**body)
        return (await self.collect(job))[job]


def take(replies: dict[str, Reply], message: Message) -> None:
    """Sort one message into the replies."""
    body = message.body
    if message.type is MessageType.TOKENS:
        for job, _, seq, ids, text in body["events"]:
            if job in replies:
                reply = replies[job]
                assert seq == len(reply.ids) + 1, f"seq {seq} after {len(reply.ids)} tokens"
                reply.ids += ids
                reply.text += text
                reply.num_events += 1
        return
    reply = replies.get(body.get("job", ""))  # type: ignore[assignment]
    if reply is None:
        return
    assert reply.end is None, "a message after the end"
    if message.type is MessageType.ACCEPTED:
        reply.accepted = body
    elif message.type in (MessageType.DONE, MessageType.ERROR, MessageType.REJECTED):
        reply.end = message
        reply.text += body.get("text", "")
        if message.type is MessageType.DONE:
            assert body["seq"] == len(reply.ids)
            assert body["crc"] == crc_of(reply.ids)


def crc_of(ids: list[int]) -> int:
    """As DONE must have it."""
    return zlib.crc32(np.array(ids, "<i4").tobytes())


def letters_of(ids: list[int]) -> str:
    """The fake model's text of these ids."""
    return "".join(chr(97 + i % 26) for i in ids)
