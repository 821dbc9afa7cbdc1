"""A job that several clients asked for: one has its stream, the others are not left waiting.

Who asked last has the stream. The others hear whether the job was taken, and how it ended; what
they miss of it before the end is a hole for them, which RESUME fills.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.gateway.answers import accepted_body
from broker.gateway.sender import Sender, terminal_frames
from broker.gateway.sessions import Client
from broker.gateway.stream import Stream
from tokenbus.bodies import error_to_body
from tokenbus.errors import TokenbusError
from tokenbus.protocol import MessageType


def accept_all(sender: Sender, stream: Stream, position: int) -> None:
    """The job was taken: ACCEPTED to everybody who asked for it."""
    _answer_all(sender, stream, MessageType.ACCEPTED, accepted_body(stream, position))


def reject_all(sender: Sender, stream: Stream, error: TokenbusError) -> None:
    """The job was not taken: REJECTED to everybody who asked for it."""
    _answer_all(sender, stream, MessageType.REJECTED, error_to_body(error, job=stream.job))


def tell_end(sender: Sender, stream: Stream) -> None:
    """The job has ended: its terminal message to those who do not have the stream, once."""
    if stream.terminal is None or not stream.others:
        return
    others, stream.others = stream.others, {}
    frames = terminal_frames(stream.terminal)
    for client in others:
        if client.peer is not None:
            sender.answer_frames(client.peer, frames)


def heir_of(stream: Stream) -> Client | None:
    """Who gets the stream when the client that has it is gone: the newest of the others here."""
    return next((client for client in reversed(stream.others) if client.peer is not None), None)


def _answer_all(
    sender: Sender, stream: Stream, kind: MessageType, body: Mapping[str, object]
) -> None:
    for client in (*stream.others, stream.client):
        if client.peer is not None:
            sender.answer(client.peer, kind, body)
