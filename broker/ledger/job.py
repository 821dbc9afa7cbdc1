"""One job in the ledger: its state, what it has produced, when what happened.

Knows nothing of other jobs, of the queue or of the engine.
"""

from __future__ import annotations

import hashlib
import sys
import time
import zlib
from array import array
from collections.abc import Sequence
from enum import Enum

import numpy as np

from broker.messages import Accepted, Address, Done, Failed, IntArray, Submit, Tokens, Usage
from broker.queue import PRIORITIES, Ticket
from broker.ring import records
from broker.text.detokenizer import Detokenizer
from broker.text.vocabulary import Vocabulary
from tokenbus.errors import TokenbusError
from tokenbus.events import Reason

# As plain integers: looked at for every token.
_STOP, _LENGTH = int(records.Finish.STOP), int(records.Finish.LENGTH)


_NO_IDS = np.array((), dtype=np.int32)
IS_LITTLE = sys.byteorder == "little"


class JobState(Enum):
    """Where a job is. Every job ends in ENDED, by exactly one terminal event, or is released."""

    QUEUED = "queued"  # in the fair queue
    RUNNING = "running"  # in the engine under its rid, paused or not
    SUSPECT = "suspect"  # was in the engine when it died; waits to run alone
    PAUSED = "paused"  # its reader is too slow; neither in the queue nor in the engine
    ENDED = "ended"


_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.RUNNING, JobState.SUSPECT, JobState.PAUSED, JobState.ENDED}
    ),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.SUSPECT, JobState.PAUSED, JobState.ENDED}
    ),
    JobState.SUSPECT: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.ENDED}),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.SUSPECT, JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A bug in the ledger: a job was to change into a state it cannot reach."""


class Job:
    """Mutable, and touched by the ledger only. Times are CLOCK_MONOTONIC in nanoseconds."""

    __slots__ = (
        "attempt", "cached_tokens", "clear_at", "deadline_ns", "detokenizer", "door",
        "first_token_ns", "fresh", "ids", "is_paused", "launched_ns", "name", "num_prefix",
        "prepared", "rid", "seed", "state", "stop_ids", "strikes", "submitted_ns",
    )  # fmt: skip

    def __init__(self, submit: Submit, vocabulary: Vocabulary) -> None:
        prepared = submit.prepared
        self.name = prepared.request.job
        self.prepared = prepared
        self.door: Address = submit.door
        self.attempt = submit.attempt
        self.seed = submit.seed
        self.deadline_ns = submit.deadline_ns
        self.state = JobState.QUEUED
        self.ids = array("i", submit.prefix_ids)  # all output ids so far; seq of the last = len
        self.num_prefix = len(self.ids)  # of them from earlier attempts
        self.fresh: list[int] = []  # ids of the batch in hand, not yet published
        self.stop_ids = frozenset(prepared.stop_token_ids)
        self.detokenizer = Detokenizer(
            vocabulary, prepared.request.params.stop, prepared.min_tokens
        )
        self.rid = 0  # of its run in the engine; 0: none
        self.is_paused = False
        self.strikes = 0  # engine deaths with this job inside, without progress since the first
        self.clear_at = 0  # with so many ids out, a suspect is cleared
        self.submitted_ns = time.monotonic_ns()
        self.launched_ns = 0
        self.first_token_ns = 0
        self.cached_tokens = 0

    def move(self, state: JobState) -> None:
        """Change state. Raises IllegalMove."""
        if state not in _MOVES[self.state]:
            raise IllegalMove(f"job {self.name}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def tenant(self) -> str:
        """Whose share of the queue it uses."""
        return self.prepared.request.tenant

    def ticket(self) -> Ticket:
        """Its place in the queue; the cost is what is left to do at most."""
        prepared = self.prepared
        return Ticket(
            job=self.name,
            tenant=self.tenant,
            priority=PRIORITIES.index(prepared.request.priority),
            cost_tokens=len(prepared.prompt_ids) + prepared.max_tokens - len(self.ids),
            door=self.door,
        )

    def accepted(self, position: int) -> Accepted:
        """The answer to its door. position: jobs before it in the queue."""
        prompt_tokens = len(self.prepared.prompt_ids)
        return Accepted(self.name, self.attempt, self.seed, prompt_tokens, position)

    def resume_text(self) -> Reason | None:
        """Feed the ids of earlier attempts, whose text is out. The reason if they end the job."""
        ids = self.ids
        if not len(ids):
            return None
        by_token = ids[-1] in self.stop_ids and len(ids) >= self.prepared.min_tokens
        self.detokenizer.feed(ids[:-1] if by_token else ids)
        if by_token or self.detokenizer.is_stopped:
            reason: Reason = "stop"
        elif len(ids) >= self.prepared.max_tokens:
            reason = "length"
        else:
            return None
        self.detokenizer.flush()  # went out with the last token
        return reason

    def take_tokens(self, finish: int, now_ns: int) -> Tokens | None:
        """Turn the fresh ids into one event. Ids after a completed stop string are dropped.

        finish: how the run ended (`records.Finish`); the last id of a STOP adds no text, and at a
        natural end what was held back goes out here.
        """
        ids = self.fresh
        if not ids:
            return None
        self.fresh = []
        detokenizer = self.detokenizer
        by_token = finish == _STOP and ids[-1] in self.stop_ids
        text, used = detokenizer.feed(ids[:-1] if by_token else ids)
        if detokenizer.is_stopped:
            ids = ids[:used]
        elif finish and finish in (_STOP, _LENGTH):
            text += detokenizer.flush()
        seq = len(self.ids) + 1
        self.ids.extend(ids)
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        return Tokens(self.name, self.attempt, seq, ids, text)

    def done(self, reason: Reason, now_ns: int) -> Done:
        """The terminal event; its text is what was still held back."""
        return Done(
            job=self.name,
            attempt=self.attempt,
            seq=len(self.ids),
            reason=reason,
            text=self.detokenizer.flush(),
            usage=self.usage(now_ns),
            crc=crc_of(self.ids),
        )

    def failed(self, error: TokenbusError, dead: bool = False) -> Failed:
        """The terminal event of a job that ends in an error."""
        return Failed(self.name, self.attempt, len(self.ids), error, dead)

    def run_record(self, rid: int, solo: bool) -> records.Submit:
        """The run for the engine; earlier output goes along and keeps its positions."""
        prepared = self.prepared
        return records.Submit(
            rid=rid,
            prompt_ids=prepared.prompt_ids,
            prefix_ids=_int32(self.ids) if self.ids else _NO_IDS,
            stop_token_ids=_int32(prepared.stop_token_ids) if prepared.stop_token_ids else _NO_IDS,
            max_tokens=prepared.max_tokens,
            min_tokens=prepared.min_tokens,
            sampling=prepared.sampling._replace(seed=self.seed),
            priority=PRIORITIES.index(prepared.request.priority),
            solo=solo,
            cache_salt=_salt_of(self.tenant),
        )

    def tokens_per_s(self) -> float:
        """Output tokens of this attempt a second, from its first token to now."""
        num_tokens = len(self.ids) - self.num_prefix
        span_ns = time.monotonic_ns() - self.first_token_ns
        if num_tokens < 2 or not self.first_token_ns or span_ns <= 0:
            return 0.0
        return round((num_tokens - 1) * 1e9 / span_ns, 1)

    def usage(self, now_ns: int = 0) -> Usage:
        """Counts and durations until now_ns; 0: until now."""
        now_ns = now_ns or time.monotonic_ns()
        launched_ns = self.launched_ns or now_ns
        first_ns = self.first_token_ns or now_ns
        return Usage(
            prompt_tokens=len(self.prepared.prompt_ids),
            completion_tokens=len(self.ids),
            cached_tokens=self.cached_tokens,
            queue_ms=(launched_ns - self.submitted_ns) / 1e6,
            ttft_ms=(first_ns - self.submitted_ns) / 1e6,
            total_ms=(now_ns - self.submitted_ns) / 1e6,
        )


def crc_of(ids: array[int]) -> int:
    """CRC-32 over ids as little-endian int32."""
    return zlib.crc32(ids.tobytes() if IS_LITTLE else _int32(ids).astype("<i4").tobytes())


def _int32(ids: Sequence[int]) -> IntArray:
    return np.array(ids, dtype=np.int32)


def _salt_of(tenant: str) -> int:
    """Separates tenants in the prefix cache; 64 bits, so that no two share by accident."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little")
