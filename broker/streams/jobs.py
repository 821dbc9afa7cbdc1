"""A job as the Redis door holds it, and the table of all of them. Knows no connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from broker.messages import Prepared
from tokenbus.request import JobRequest


class Stage(Enum):
    """How far a job has come. READ: text prepares it. FENCING: prepared, its attempt is being
    taken. RUNNING: the ledger has it. ENDING: its last event is on its way to Redis.
    """

    READ = "read"
    FENCING = "fencing"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that share one entry of the reply stream; seq is that of the first."""

    attempt: int
    seq: int
    ids: tuple[int, ...]
    text: str

    @property
    def last_seq(self) -> int:
        """Seq of the last token."""
        return self.seq + len(self.ids) - 1

    @property
    def entry_id(self) -> str:
        """Id in the reply stream."""
        return f"{self.attempt}-{self.last_seq}"

    def fields(self) -> tuple[str, ...]:
        """Fields and values of the entry."""
        ids = ",".join(map(str, self.ids))
        return ("event", "tokens", "seq", str(self.seq), "ids", f"[{ids}]", "text", self.text)


@dataclass(frozen=True, slots=True)
class Ending:
    """What is written when the job's tokens are out.

    fields: of the terminal entry, names and values in turn; empty: the job is given back instead.
    dead_reason: why it goes to the dead stream too, or "". frees_key: its idempotency key may be
    used again. is_discard: its keys cannot be written, so it only goes to the dead stream.
    """

    fields: tuple[str, ...] = ()
    dead_reason: str = ""
    frees_key: bool = False
    is_discard: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """One entry of a jobs stream in this worker's hands. Times are of the event loop's clock."""

    stream: str
    entry: str
    request: JobRequest
    fingerprint: str
    lease_end: float
    stage: Stage = Stage.READ
    prepared: Prepared | None = None
    is_settled: bool = False  # the ledger has answered, so its capacity counts the job
    is_cancelled: bool = False
    was_asked: bool = False  # the fence script may have run, its answer was lost
    base_seq: int = 0  # of the last token before this attempt
    is_cleared: bool = False  # as a suspect it has got so far that it is none any more
    attempt: int = 0
    seed: int = 0
    log: list[Chunk] = field(default_factory=list)  # in the reply stream
    flight: Chunk | None = None  # being written, perhaps for the second time
    ids: list[int] = field(default_factory=list)  # waiting to be written after it
    texts: list[str] = field(default_factory=list)
    ending: Ending | None = None
    in_doubt: bool = False  # what the reply stream holds has to be looked up first
    is_ending_sent: bool = False  # the last write held the ending
    is_paused: bool = False
    due: float = 0.0
    last_flush: float = 0.0
    key: tuple[str, str] = field(init=False)  # stream and entry id

    def __post_init__(self) -> None:
        self.key = self.stream, self.entry

    @property
    def id(self) -> str:
        """The job id."""
        return self.request.job

    @property
    def written_seq(self) -> int:
        """Seq of the last token that is in the reply stream."""
        return self.log[-1].last_seq if self.log else 0

    @property
    def next_seq(self) -> int:
        """Seq of the next token to come."""
        return (self.flight.last_seq if self.flight else self.written_seq) + len(self.ids) + 1

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; 0 before it is prepared."""
        return len(self.prepared.prompt_ids) if self.prepared else 0

    @property
    def has_work(self) -> bool:
        """Something is to be written, or looked up."""
        return bool(self.ids or self.flight or self.ending or self.in_doubt)

    def launch(self) -> Chunk | None:
        """Move what waits into `flight`; None if nothing does. What is there already was sent once
        and stays as it is: a reader may have it, and could not use it grouped with later tokens.
        """
        if self.ids and self.flight is None:
            seq = self.written_seq + 1
            self.flight = Chunk(self.attempt, seq, tuple(self.ids), "".join(self.texts))
            self.ids, self.texts = [], []
        return self.flight

    def land(self) -> None:
        """What was in flight is in the reply stream."""
        if self.flight is not None:
            self.log.append(self.flight)
            self.flight = None

    def output_ids(self) -> list[int]:
        """All output tokens known to the door, earlier attempts included."""
        chunks = [*self.log, *((self.flight,) if self.flight else ())]
        return [*(token for chunk in chunks for token in chunk.ids), *self.ids]


class JobTable:
    """All jobs in hand, by entry; those past the fence also by job id."""

    def __init__(self) -> None:
        self._by_entry: dict[tuple[str, str], Job] = {}
        self._by_id: dict[str, Job] = {}
        self.num_unsettled = 0

    def __len__(self) -> int:
        return len(self._by_entry)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_entry.values()))

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._by_entry

    def is_held(self, job: Job) -> bool:
        """The job has not been forgotten meanwhile."""
        return self._by_entry.get(job.key) is job

    def add(self, job: Job) -> None:
        """A job that was just read."""
        self._by_entry[job.key] = job
        self.num_unsettled += 1

    def name(self, job: Job) -> None:
        """The job is past the fence: its id is ours."""
        self._by_id[job.id] = job

    def by_id(self, job_id: str) -> Job | None:
        """The job past the fence with that id."""
        return self._by_id.get(job_id)

    def before_fence(self, job_id: str) -> Sequence[Job]:
        """Jobs with that id that are not past the fence."""
        return [job for job in self if job.id == job_id and job.attempt == 0]

    def settle(self, job: Job) -> None:
        """The ledger has answered for the job."""
        if not job.is_settled:
            job.is_settled = True
            self.num_unsettled -= 1

    def forget(self, job: Job) -> None:
        """The job is no longer ours, or it has ended."""
        if self._by_entry.get(job.key) is not job:
            return
        del self._by_entry[job.key]
        if self._by_id.get(job.id) is job:
            del self._by_id[job.id]
        self.settle(job)
        job.prepared = None  # which holds the job in its context

    def entries_of(self, stream: str) -> list[Job]:
        """Jobs that came from a stream."""
        return [job for job in self if job.stream == stream]
