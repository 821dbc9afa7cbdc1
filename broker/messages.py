"""What the broker's actors say to each other. All messages are frozen; names say what is asked or
what happened.

The way of a job: a door parses it and sends `Prepare` to text, gets `Prepared` or `PrepareFailed`,
fences it where the door is Redis, and sends `Submit` to the ledger. The ledger asks the queue when
to run it and the engine link to run it. Each engine step comes back as one `Publish` per door,
with one event per job that got tokens. A job ends in exactly one `Done` or `Failed` event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from broker.ring.records import Sampling
from tokenbus.errors import TokenbusError
from tokenbus.events import Done as Done  # the same here as for a client
from tokenbus.events import Reason
from tokenbus.events import Usage as Usage
from tokenbus.request import JobRequest

IntArray = npt.NDArray[np.int32]


class Address(Protocol):
    """Where messages for an actor go. `tell` never blocks; False means the mailbox is full and
    nothing was kept."""

    def tell(self, message: object) -> bool:
        """Put one message into the actor's mailbox."""
        ...


# ---------------------------------------------------------------- to text


@dataclass(frozen=True, slots=True)
class Prepare:
    """Turn a request into token ids and resolved numbers. The answer goes to `reply_to`."""

    request: JobRequest
    reply_to: Address
    context: object = None  # comes back untouched: the door's own handle (peer, entry id)


# ---------------------------------------------------------------- text -> door


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt as int32 [P] ids, defaults resolved and everything checked against
    the model."""

    request: JobRequest
    prompt_ids: IntArray
    sampling: (
        Sampling  # seed is 0 where the request has none; the ledger or the Redis fence draws it
    )
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless ignore_eos
    max_tokens: int
    min_tokens: int
    context: object = None


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """The request cannot run; `error` names the field."""

    request: JobRequest
    error: TokenbusError
    context: object = None


# ---------------------------------------------------------------- door -> ledger


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this job and publish to `door`.

    prefix_ids: output tokens that earlier attempts published (seqs 1..len); the run continues at
    the next seq.
    seed: fixed for the life of the job. deadline_ns: CLOCK_MONOTONIC, or None.
    """

    prepared: Prepared
    door: Address
    attempt: int
    seed: int
    prefix_ids: tuple[int, ...] = ()
    deadline_ns: int | None = None
    solo: bool = False  # a suspect after a crash elsewhere: runs alone


@dataclass(frozen=True, slots=True)
class AboutJob:
    """Something about a job that is named by its id. `door`, and an `attempt` above 0, say which
    one is meant: the ledger leaves the job alone that another door, or a later attempt, has under
    the same id. Without them it is whoever has the id now.
    """

    job: str
    door: Address | None = field(default=None, kw_only=True)
    attempt: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Cancel(AboutJob):
    """End the job with `Done(reason)`; unknown jobs are ignored by the ledger (doors answer
    not_found)."""

    reason: Reason = "cancelled"


@dataclass(frozen=True, slots=True)
class Drop(AboutJob):
    """Forget the job without any event: another worker owns it now (fenced), or it is released on
    drain."""


@dataclass(frozen=True, slots=True)
class Pause(AboutJob):
    """Stop generating for this job until `Unpause`: its reader is too slow."""


@dataclass(frozen=True, slots=True)
class Unpause(AboutJob):
    """Inverse of `Pause`."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new jobs. Running ones finish until drain_ms is over; then the ledger sends
    `Released` to the doors."""

    drain_ms: int


# ---------------------------------------------------------------- ledger -> door


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is in the ledger and will end in exactly one terminal event."""

    job: str
    attempt: int
    seed: int
    prompt_tokens: int
    queue_position: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The job is not in the ledger: queue full, draining, or the id is taken. No further event
    follows. attempt: of the `Submit` that this answers; 0 for a job that Redis did not take."""

    job: str
    error: TokenbusError
    attempt: int = 0


class Tokens(NamedTuple):
    """Output tokens of one job. seq: of the first id; the last one's is seq + len(ids) - 1. text
    is valid UTF-8. A tuple, and its order that of an event on the wire: there are many.

    The text after N tokens depends on those N ids only, so an attempt that continues from a log
    repeats nothing.
    """

    job: str
    attempt: int
    seq: int
    ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The job's end by error. seq as in `Done`."""

    job: str
    attempt: int
    seq: int
    error: TokenbusError
    dead: bool = False  # to the dead stream (Redis): the job must not be tried again


Event = Tokens | Done | Failed


@dataclass(frozen=True, slots=True)
class Publish:
    """All events of one engine step (or one housekeeping pass) for one door, in order."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Released:
    """Jobs, and which attempts at them, given up on drain without a terminal event; the Redis door
    hands them back uncounted."""

    jobs: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many more jobs the ledger wants from the Redis door now (0: leave them in the stream).
    Only doors that fetch their jobs are told."""

    slots: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """Sent to doors on every change and each second.

    progress: step counter that grows while the engine's loop lives, working or idle; leases are
    renewed only while it grows. loading: no engine is ready, but one is on its way: it reads
    weights, or the last one died so short a time ago that the next may still be starting. Jobs wait
    for it, so leases are renewed. suspects: jobs that were in the engine when it died (empty
    otherwise).
    """

    ready: bool
    progress: int
    loading: bool = False
    suspects: Sequence[str] = ()
    num_queued: int = 0  # jobs in the queue, both doors together
    num_running: int = 0  # jobs in the engine
    engine: Mapping[str, object] | None = None  # the engine's latest STATS record
    vitals: Mapping[str, float] | None = None  # `Metrics.vitals`, for whoever watches the bus


# ---------------------------------------------------------------- ZeroMQ door -> Redis door


@dataclass(frozen=True, slots=True)
class SubmitDurable:
    """Put this job into Redis, where any worker may run it, and tell `door` what becomes of it.

    `door` gets the messages that the ledger would send: `Accepted` when a worker has taken the job,
    or `Refused`, then `Publish`. For such a job `Cancel`, `Pause`, `Unpause` (of the relay, not of
    the job) and `Drop` (of the relay) go to the Redis door too.
    """

    request: JobRequest
    door: Address


@dataclass(frozen=True, slots=True)
class Follow:
    """Tell `door` about a job that is in Redis already, from the token after seq `after` on.

    Events that end at or before `after` are left out; one that spans it comes whole.
    """

    job: str
    door: Address
    after: int = 0


@dataclass(frozen=True, slots=True)
class Find:
    """Does Redis know this job? The answer is `Found`. For jobs that were put there before this
    broker started, or by another one."""

    job: str
    door: Address
    context: object = None  # comes back untouched


@dataclass(frozen=True, slots=True)
class Found:
    """fields: the job's hash, None if there is no such job. seq: of its last token. error: Redis
    could not be asked."""

    job: str
    context: object
    fields: Mapping[str, str] | None = None
    seq: int = 0
    error: TokenbusError | None = None


# ---------------------------------------------------------------- door -> app


@dataclass(frozen=True, slots=True)
class DoorStatus:
    """A door became ready or stopped being so; sent on every change. reason: why it is not."""

    door: str
    ready: bool
    reason: str = ""
