"""The log of one job for its client: what was generated, and what of it was sent.

Holds the last ids and their text, so that sending can go on from any seq in the log. The text up to
a seq is found again by decoding the ids up to it, which gives the same text as the first time.
"""

from __future__ import annotations

from array import array
from enum import Enum

from broker.gateway.digest import digest_of
from broker.gateway.sessions import Client
from broker.messages import Address, Done, Failed, Prepared, Tokens
from broker.text.detokenizer import Detokenizer
from tokenbus.errors import Gone
from tokenbus.request import JobRequest

MAX_TEXT_PIECES = 64
MAX_UNSENT_CHARS = 256 << 10  # then the job is paused, however few tokens that is


class StreamState(Enum):
    """What the ledger knows of the job."""

    PREPARING = "preparing"  # with the text actor, or on its way to the ledger
    LIVE = "live"
    ENDED = "ended"


class Stream:
    """seqs up to `base_seq` are not in the log: the client had them, or they were trimmed."""

    __slots__ = (
        "_base", "_digest", "_ids", "_num_chars", "_pieces", "_request", "_sent_chars",
        "attempt", "base_seq", "client",
        "deadline_ns", "is_attached", "is_cancelled", "is_paused", "job", "kept_from_s",
        "others", "owner", "prefix", "prompt_tokens", "seed", "sent_seq", "state", "tenant",
        "terminal", "terminal_sent",
    )  # fmt: skip

    def __init__(
        self, job: str, client: Client, request: JobRequest | None, tenant: str, owner: Address
    ) -> None:
        self.job = job
        self.owner = owner  # who ends, pauses and continues the job
        self.client = client
        self.others: dict[Client, None] = {}  # who asked for the job, and has not heard its end
        self.tenant = tenant
        self._request = request
        self._digest = b""
        self.state = StreamState.PREPARING
        self.attempt = 1
        self.seed = 0
        self.prompt_tokens = 0
        self.prefix: tuple[int, ...] = ()
        self.deadline_ns: int | None = None
        self.is_attached = True  # the client's session takes its events
        self.is_cancelled = False
        self.is_paused = False
        self.terminal: Done | Failed | None = None
        self.terminal_sent = False
        self.kept_from_s = 0.0  # its end, or when that was told
        self.base_seq = 0
        self.sent_seq = 0
        self._base: Detokenizer | None = None  # its state at base_seq
        self._ids = array("i")
        self._pieces: list[str] = []
        self._num_chars = 0
        self._sent_chars = 0

    def open(self, prepared: Prepared, base: Detokenizer) -> None:
        """The request is prepared; base: a fresh detokenizer for it."""
        self.prefix = prepared.request.have
        self.prompt_tokens = len(prepared.prompt_ids)
        if self.prefix:
            base.feed(self.prefix)
        self._base = base
        self.base_seq = self.sent_seq = len(self.prefix)

    def awaits(self, attempt: int) -> bool:
        """Whether the ledger was asked for this attempt and has not answered: an answer to anybody
        who had the id before is not for this stream.
        """
        is_asked = self.state is StreamState.PREPARING and self._base is not None
        return is_asked and attempt == self.attempt

    @property
    def digest(self) -> bytes:
        """Of the request: is a second SUBMIT the same job? Empty where the request is not known."""
        if self._request is not None:
            self._digest = digest_of(self._request)
            self._request = None  # a prompt can be long
        return self._digest

    def seal(self) -> None:
        """The job is on its way: now there is time for the digest."""
        _ = self.digest

    @property
    def last_seq(self) -> int:
        """Seq of the newest token."""
        return self.base_seq + len(self._ids)

    @property
    def has_unsent(self) -> bool:
        """Whether tokens wait to be sent."""
        return self.sent_seq < self.base_seq + len(self._ids)

    @property
    def num_unsent(self) -> int:
        """Tokens that wait to be sent."""
        return self.last_seq - self.sent_seq

    def append(self, event: Tokens) -> None:
        """Log an event."""
        self._ids.extend(event.ids)
        self._num_chars += len(event.text)
        pieces = self._pieces
        pieces.append(event.text)
        if len(pieces) > MAX_TEXT_PIECES:
            self._pieces = ["".join(pieces)]

    def mark_sent(self, event: Tokens) -> None:
        """The newest event goes out as it came."""
        self.sent_seq = event.seq + len(event.ids) - 1
        self._sent_chars = self._num_chars

    def unmark(self, event: Tokens) -> None:
        """It did not go out after all; the last marked comes first."""
        self.sent_seq = event.seq - 1
        self._sent_chars -= len(event.text)

    def unsent(self) -> list[object]:
        """The event for a TOKENS message that holds everything unsent, as wire values."""
        ids = self._ids[self.sent_seq - self.base_seq :].tolist()
        text = "".join(self._pieces)[self._sent_chars :]
        return [self.job, self.attempt, self.sent_seq + 1, ids, text]

    def mark_all_sent(self) -> None:
        """What `unsent` gave went out."""
        self.sent_seq = self.last_seq
        self._sent_chars = self._num_chars

    def is_over(self, max_tokens: int) -> bool:
        """Whether so much is unsent that the job should pause."""
        return self.num_unsent > max_tokens or self._num_chars - self._sent_chars > MAX_UNSENT_CHARS

    def check(self, after: int) -> None:
        """Raises Gone if what follows this seq is not in the log."""
        if after > self.last_seq:
            message = f"after: {after} is beyond the last token, {self.last_seq}"
            raise Gone(message, field="after")
        if after < self.base_seq:
            message = f"after: the log of this job begins after seq {self.base_seq}"
            raise Gone(message, field="after")

    def rewind(self, after: int) -> None:
        """Send again from seq after + 1. Raises Gone as `check` does."""
        self.check(after)
        if after == self.last_seq or self._base is None:
            self._sent_chars = self._num_chars
        else:
            text, _ = self._base.copy().feed(self._ids[: after - self.base_seq])
            self._sent_chars = len(text)
        self.sent_seq = after
        self.terminal_sent = False
        self.is_attached = True

    def restart(self) -> None:
        """Send the whole log again."""
        self.rewind(self.base_seq)

    def trim(self, max_tokens: int) -> None:
        """Keep the log within max_tokens, dropping a quarter of it at once, if that was sent and
        nobody else is left who may still ask for it.
        """
        if len(self._ids) <= max_tokens or self._base is None or self.others:
            return
        count = min(max_tokens // 4, self.sent_seq - self.base_seq)
        if count <= 0:
            return
        text, _ = self._base.feed(self._ids[:count])
        del self._ids[:count]
        self._pieces = ["".join(self._pieces)[len(text) :]]
        self._num_chars -= len(text)
        self._sent_chars -= len(text)
        self.base_seq += count

    def clear_log(self, seq: int) -> None:
        """Hold nothing; what comes next follows `seq`."""
        del self._ids[:]
        self._pieces = []
        self._num_chars = self._sent_chars = 0
        self.base_seq = self.sent_seq = seq

    def end(self, event: Done | Failed) -> None:
        """The job's one terminal event."""
        self.state = StreamState.ENDED
        self.terminal = event
