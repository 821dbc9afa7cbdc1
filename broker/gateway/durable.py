"""Durable jobs: they live in Redis, any worker runs them, and this door only passes them on.

SUBMIT puts the job into Redis; the relay of the Redis door then tells what becomes of it. The log
that RESUME goes back to is the reply stream, so a client finds its job again after the death of
this broker, and at any other worker of the queue. A client that is gone cancels nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.gateway.answers import found_stats, unknown
from broker.gateway.relayed import RelayedStream
from broker.gateway.sender import Sender
from broker.gateway.sessions import Client
from broker.gateway.shared import accept_all, heir_of, tell_end
from broker.gateway.stream import StreamState
from broker.gateway.table import StreamTable
from broker.messages import (
    Accepted,
    Address,
    Cancel,
    Done,
    Drop,
    Failed,
    Find,
    Follow,
    Found,
    SubmitDurable,
    Tokens,
)
from tokenbus.bodies import error_to_body
from tokenbus.errors import Conflict, Gone, TokenbusError, Unsupported
from tokenbus.protocol import MessageType
from tokenbus.request import JobRequest


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a client wants of a job that may be in Redis. after: of a RESUME."""

    client: Client
    kind: MessageType
    after: int = 0


class DurableJobs:
    """door: this door, as the relay answers it. relay: the Redis door."""

    def __init__(self, table: StreamTable, sender: Sender, door: Address, relay: Address) -> None:
        self._table = table
        self._sender = sender
        self._door = door
        self._relay = relay
        self.on_reject: Callable[[RelayedStream, TokenbusError], None] = _ignore
        self.on_change: Callable[[Client], None] = _ignore
        self.handlers: dict[type, Callable[[Any], None]] = {Found: self._on_found}

    # ------------------------------------------------------------ from clients

    def submit(self, client: Client, request: JobRequest) -> None:
        """A new job, as far as this door knows; Redis may know better. Who follows it by its name
        alone hears its end. Raises Conflict, Unsupported.
        """
        if request.have:
            message = "have: Redis itself has the tokens of a durable job; send RESUME"
            raise Unsupported(message, field="have")
        stream = RelayedStream(request.job, client, request, request.tenant, self._relay)
        known = self._table.get(request.job)
        if known is not None:
            if known.tenant != request.tenant:
                raise Conflict(f"job: {request.job!r} is taken by a different request", field="job")
            self._relay.tell(Drop(known.job))  # or its events would be taken for the new one's
            stream.others = {c: None for c in (*known.others, known.client) if c is not client}
            self._table.forget(known)
        self._table.add(stream)
        self._relay.tell(SubmitDurable(request, self._door))

    def rewind(self, stream: RelayedStream, client: Client, after: int) -> None:
        """Tell the job again from seq after + 1, to this client. Raises Gone."""
        stream.check(after)
        self._table.attach(stream, client)
        self._tell_again(stream, after)

    def listen(self, stream: RelayedStream) -> None:
        """A session that did not say from where it wants the job is to hear the end."""
        if not stream.is_attached:
            self.rewind(stream, stream.client, stream.known_seq)

    def look_up(
        self, client: Client, job: str, kind: MessageType = MessageType.STATS, after: int = 0
    ) -> None:
        """CANCEL, RESUME or STATS of a job that only Redis can know."""
        self._relay.tell(Find(job, self._door, _Wish(client, kind, after)))

    def abandon(self, stream: RelayedStream) -> None:
        """The client is gone; the job runs on, and goes to who else asked for it."""
        heir = heir_of(stream)
        if heir is not None:
            self._table.pass_on(stream, heir)
            self._tell_again(stream, 0)
            return
        self._relay.tell(Drop(stream.job))
        self._table.forget(stream)

    # ------------------------------------------------------------ from the relay

    def on_accepted(self, stream: RelayedStream, message: Accepted) -> None:
        """A worker runs the job."""
        stream.attempt = message.attempt
        stream.seed = message.seed
        stream.prompt_tokens = message.prompt_tokens
        self._greet(stream)

    def on_event(self, stream: RelayedStream, event: Tokens | Done | Failed) -> None:
        """What the reply stream says. Events from before a `Follow` may come after it: what does
        not continue the log is on its way once more.
        """
        if isinstance(event, Failed) and stream.state is StreamState.PREPARING:
            self.on_reject(stream, event.error)
            return
        self._greet(stream)
        if isinstance(event, Tokens):
            if stream.continues(event):
                self._sender.add(stream, event)
            elif event.seq <= stream.last_seq < event.seq + len(event.ids) - 1:
                self._break_off(stream, event)
        elif event.seq == stream.last_seq and stream.terminal is None:
            self._table.end(stream, event)
            tell_end(self._sender, stream)
            self.on_change(stream.client)

    def _greet(self, stream: RelayedStream) -> None:
        """ACCEPTED, once."""
        if stream.state is not StreamState.PREPARING:
            return
        stream.state = StreamState.LIVE
        accept_all(self._sender, stream, 0)
        stream.seal()

    def _break_off(self, stream: RelayedStream, event: Tokens) -> None:
        """Only a RESUME from within an entry comes here: its text cannot be cut by token."""
        peer = stream.client.peer
        if peer is not None:
            error = Gone(f"after: the log can go on after seq {event.seq - 1}", field="after")
            body = error_to_body(error, job=stream.job)
            self._sender.answer(peer, MessageType.ERROR, body)
        self.abandon(stream)

    def _on_found(self, message: Found) -> None:
        wish = message.context
        if not isinstance(wish, _Wish) or wish.client.peer is None:
            return
        client, peer = wish.client, wish.client.peer
        try:
            self._grant(wish, message)
        except TokenbusError as error:
            self._sender.answer(peer, MessageType.ERROR, error_to_body(error, job=message.job))
        self.on_change(client)

    def _grant(self, wish: _Wish, found: Found) -> None:
        """Raises what stands against it."""
        client, peer, job = wish.client, wish.client.peer, found.job
        if found.error is not None:
            raise found.error
        tenant = (found.fields or {}).get("tenant", "")
        if found.fields is None or not self._table.may_see(client, tenant):
            raise unknown(job)
        if wish.kind is MessageType.STATS:
            if peer is not None:
                self._sender.try_answer(peer, MessageType.STATS, found_stats(found))
            return
        after = wish.after if wish.kind is MessageType.RESUME else found.seq
        stream = self._table.get(job)
        if stream is None:
            stream = RelayedStream(job, client, None, tenant, self._relay)
            stream.state = StreamState.LIVE
        if not isinstance(stream, RelayedStream):
            raise unknown(job)  # in the meantime somebody has taken its id
        stream.known_seq = max(stream.known_seq, found.seq)
        stream.check(after)
        self._table.add(stream)
        self.rewind(stream, client, after)
        has_ended = (found.fields or {}).get("state") in ("done", "failed")
        if wish.kind is MessageType.CANCEL and not has_ended:
            self._relay.tell(Cancel(job))

    def _tell_again(self, stream: RelayedStream, after: int) -> None:
        """Everything from seq after + 1; a job that waits has told nothing yet."""
        stream.is_attached = True
        if stream.state is not StreamState.PREPARING:
            self._table.reopen(stream)
            stream.reset(after)
            self._relay.tell(Follow(stream.job, self._door, after))


def _ignore(*_: object) -> None:
    """Until `Jobs` says who is to know."""
