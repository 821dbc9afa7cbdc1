"""The stream of a durable job: what of its log in Redis was read and not sent yet."""

from __future__ import annotations

from broker.gateway.sessions import Client
from broker.gateway.stream import Stream
from broker.messages import Address, Tokens
from tokenbus.errors import Gone
from tokenbus.request import JobRequest


class RelayedStream(Stream):
    """known_seq: the newest token that this door has seen; it may have gone back since."""

    __slots__ = ("known_seq",)

    def __init__(
        self, job: str, client: Client, request: JobRequest | None, tenant: str, relay: Address
    ) -> None:
        super().__init__(job, client, request, tenant, relay)
        self.known_seq = 0

    def awaits(self, attempt: int) -> bool:
        """Whichever attempt a worker is at: the reply stream in Redis has them all in order."""
        return True

    def append(self, event: Tokens) -> None:
        super().append(event)
        self.attempt = event.attempt
        self.known_seq = max(self.known_seq, self.last_seq)

    def continues(self, event: Tokens) -> bool:
        """Whether the event is the next one."""
        return event.seq == self.last_seq + 1

    def check(self, after: int) -> None:
        """Raises Gone if nobody can have the token of this seq."""
        if after > self.known_seq:
            message = f"after: {after} is beyond the last token, {self.known_seq}"
            raise Gone(message, field="after")

    def reset(self, after: int) -> None:
        """Nothing is here; what follows `after` comes from Redis again."""
        self.clear_log(after)
        self.is_paused = False

    def trim(self, max_tokens: int) -> None:
        """What was sent is in Redis, and need not be here."""
        if not self.has_unsent:
            self.clear_log(self.sent_seq)


def is_by_name(stream: Stream) -> bool:
    """Whether the stream follows a job of Redis whose request is not known here."""
    return isinstance(stream, RelayedStream) and not stream.digest
