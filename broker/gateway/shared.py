"""A job that several clients asked for: one has its stream, the others are not left waiting.

Who asked last has the stream. The others hear whether the job was taken, and how it ended; what
they miss of it before the end is a hole for them, which RESUME fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.gateway.answers import accepted_body
from broker.gateway.sender import Sender, terminal_frames
from broker.gateway.sessions import Client
from broker.gateway.stream import Stream
from broker.messages import Address
from tokenbus.bodies import error_to_body
from tokenbus.errors import Busy, TokenbusError
from tokenbus.protocol import MessageType

MAX_WAITING = 10_000  # streams with something unsent, for one client


@dataclass(frozen=True, slots=True)
class Wiring:
    """Whom the jobs' messages go to. door: this door, as text and ledger answer it."""

    door: Address
    text: Address
    ledger: Address


def check_backlog(client: Client) -> None:
    """Raises Busy for a client that asks for more and more and takes nothing: what it has not got
    is kept for it.
    """
    if len(client.waiting) >= MAX_WAITING:
        raise Busy(f"{MAX_WAITING} jobs of this client wait for its credit", retry_ms=1_000)


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
    for client in {**stream.others, stream.client: None}:
        if client.peer is not None:
            sender.answer(client.peer, kind, body)
