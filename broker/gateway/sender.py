"""What goes to the clients: answers at once, tokens as credit and the socket allow.

A stream that cannot be sent now (no credit, a full socket, no session) stays in its client's
`waiting`; its events merge in the log, and go out in one piece when the way is free. Terminal
messages follow a job's last token and cost no credit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.gateway.router import Router, Sent
from broker.gateway.sessions import MAX_PENDING, Client, Peer
from broker.gateway.stream import Stream
from broker.messages import Done, Failed, Tokens
from tokenbus.bodies import error_to_body
from tokenbus.events import usage_to_map
from tokenbus.protocol import MessageType, encode_trusted

MAX_EVENTS_CHARS = 256 << 10  # of unsent text in one TOKENS message; a client's limit is above it

Batch = dict[Client, list[tuple[Stream, Tokens]]]


class Sender:
    """on_backlog(stream, is_over): a stream's backlog got too long, or was sent."""

    def __init__(self, router: Router, log_tokens_per_job: int) -> None:
        self._router = router
        self._log_tokens = log_tokens_per_job
        self.on_backlog: Callable[[Stream, bool], None] = _ignore
        self._batch: Batch = {}
        self.blocked: set[Peer] = set()
        self.num_events = 0  # sent since start
        self.num_messages = 0

    # ------------------------------------------------------------ answers

    def answer(self, peer: Peer, kind: MessageType, body: Mapping[str, object]) -> None:
        """Send a message that must not be lost while the peer lives; waits if its queue is full."""
        self.answer_frames(peer, encode_trusted(kind, body))

    def answer_frames(self, peer: Peer, frames: list[bytes]) -> None:
        """The same, with a message that is encoded already."""
        if not peer.pending and self._send(peer, frames):
            return
        if peer.is_blocked and len(peer.pending) < MAX_PENDING:
            peer.pending.append(frames)

    def try_answer(self, peer: Peer, kind: MessageType, body: Mapping[str, object]) -> None:
        """Send a message that may be lost: PONG, errors about frames."""
        if not peer.pending:
            self._send(peer, encode_trusted(kind, body))

    # ------------------------------------------------------------ tokens

    def add(self, stream: Stream, event: Tokens) -> None:
        """Log an event, and put it into this burst's message if it can go out as it came."""
        is_current = stream.sent_seq == event.seq - 1
        stream.append(event)
        client = stream.client
        peer = client.peer
        if (
            is_current
            and stream.is_attached
            and client.used < client.credit
            and peer is not None
            and not peer.is_blocked
        ):
            client.used += 1
            stream.mark_sent(event)
            batch = self._batch.get(client)
            if batch is None:
                self._batch[client] = [(stream, event)]
            else:
                batch.append((stream, event))
            return
        client.waiting[stream.job] = stream
        if not stream.is_paused and stream.is_over(self._log_tokens // 2):
            self.on_backlog(stream, True)

    def flush_batch(self) -> None:
        """One TOKENS message for each client that got events in this burst."""
        if not self._batch:
            return
        batches, self._batch = self._batch, {}
        for client, batch in batches.items():
            if self._send_tokens(client, [event for _, event in batch]):
                for stream, _ in batch:
                    stream.trim(self._log_tokens)
                continue
            client.used -= len(batch)
            for stream, event in reversed(batch):
                stream.unmark(event)
                client.waiting[stream.job] = stream

    def flush_client(self, client: Client) -> None:
        """Send what waits for a client, as far as it goes."""
        peer = client.peer
        if peer is None or not client.waiting or peer.is_blocked:
            return
        rows: list[object] = []
        chunk: list[Stream] = []
        num_chars = 0
        for stream in list(client.waiting.values()):
            if stream.has_unsent and stream.is_attached and client.used + len(rows) < client.credit:
                row = stream.unsent()
                rows.append(row)
                chunk.append(stream)
                num_chars += len(row[4]) + 8 * len(row[3])  # type: ignore[arg-type]
                if num_chars >= MAX_EVENTS_CHARS:
                    if not self._send_chunk(client, rows, chunk):
                        return
                    rows, chunk, num_chars = [], [], 0
        if rows and not self._send_chunk(client, rows, chunk):
            return
        self._send_terminals(client, peer)

    def unblock(self) -> None:
        """One turn: try the peers whose queue was full again. Each try encodes what waits for the
        peer, so one that stays full is tried less and less often.
        """
        blocked, self.blocked = self.blocked, set()
        for peer in blocked:
            if peer.num_skips:
                peer.num_skips -= 1
                self.blocked.add(peer)
                continue
            peer.is_blocked = False
            while peer.pending and self._send(peer, peer.pending[0]):
                peer.pending.popleft()
            if not peer.is_blocked and peer.client is not None and peer.client.peer is peer:
                self.flush_client(peer.client)
            if peer.is_blocked:
                peer.refuse()
            else:
                peer.num_refusals = 0

    def _send_chunk(self, client: Client, rows: Sequence[object], chunk: list[Stream]) -> bool:
        if not self._send_tokens(client, rows):
            return False
        client.used += len(rows)
        for stream in chunk:
            stream.mark_all_sent()
            stream.trim(self._log_tokens)
            if stream.is_paused:
                self.on_backlog(stream, False)
        return True

    def _send_tokens(self, client: Client, rows: Sequence[object]) -> bool:
        peer = client.peer
        if peer is None or peer.pending:
            return False
        if not self._send(peer, encode_trusted(MessageType.TOKENS, {"events": rows})):
            return False
        self.num_events += len(rows)
        self.num_messages += 1
        return True

    def _send_terminals(self, client: Client, peer: Peer) -> None:
        for job, stream in list(client.waiting.items()):
            if stream.has_unsent or not stream.is_attached:
                continue
            if stream.terminal is not None and not stream.terminal_sent:
                if peer.pending or not self._send(peer, terminal_frames(stream.terminal)):
                    return
                stream.terminal_sent = True
            del client.waiting[job]

    def _send(self, peer: Peer, frames: list[bytes]) -> bool:
        sent = self._router.send(peer.routing_id, frames)
        if sent is Sent.OK:
            return True
        if sent is Sent.FULL:
            peer.is_blocked = True
            self.blocked.add(peer)
        else:
            peer.pending.clear()
            if peer.client is not None and peer.client.peer is peer:
                peer.client.peer = None  # its streams go on into their logs
        return False


def terminal_frames(event: Done | Failed) -> list[bytes]:
    """DONE, or ERROR with the job."""
    if isinstance(event, Failed):
        where = {"job": event.job, "attempt": event.attempt, "seq": event.seq}
        return encode_trusted(MessageType.ERROR, error_to_body(event.error, **where))
    body = {
        "job": event.job,
        "attempt": event.attempt,
        "seq": event.seq,
        "reason": event.reason,
        "text": event.text,
        "usage": usage_to_map(event.usage),
        "crc": event.crc,
    }
    return encode_trusted(MessageType.DONE, body)


def _ignore(stream: Stream, is_over: bool) -> None:
    """Until the door says who is to know."""
