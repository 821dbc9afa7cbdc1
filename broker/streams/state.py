"""What the parts of the Redis door share: the actor's private state and the few moves on it that
more than one part makes. All of it lives on the broker's event loop; nothing here awaits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from broker.config import BrokerConfig, RedisConfig
from broker.messages import AboutJob, Address, Cancel, Drop, Pause, Unpause
from broker.streams.jobs import Ending, Job, JobTable, Stage
from broker.streams.lane import ReplyError
from broker.streams.link import Link
from tokenbus.keys import Keys

log = structlog.get_logger("broker.streams")

# While a job is not finished its keys outlive a long absence of every worker.
UNFINISHED_TTL_MS = 24 * 3_600_000
# A job that published so many tokens since its last start did not crash its worker at once.
PROGRESS_TOKENS = 16  # more than one flush can hold back
PAUSE_TOKENS = 4_096  # unpublished tokens of one job after which it is paused
RETRY_S = 0.5
# Parts without which no job can be brought to an end: no more are taken while one is in trouble.
_WORK = frozenset({"pickup", "publish", "renew"})


@dataclass(slots=True)
class Counters:
    """Since the start of the process; for metrics and tests."""

    read: int = 0
    claimed: int = 0
    taken_over: int = 0  # claimed from a worker that fell silent, not given back by it
    released: int = 0
    deleted: int = 0  # pending entries whose body was gone
    fenced: int = 0  # jobs that another worker had taken from us
    finished: int = 0
    rejected: int = 0
    duplicates: int = 0
    dead: int = 0
    restored: int = 0  # replies written again after Redis lost them
    reconnects: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # rejected, by error code


class DoorState:
    """The door's jobs, capacity and health."""

    def __init__(
        self,
        config: BrokerConfig,
        redis: RedisConfig,
        door: Address,
        text: Address,
        ledger: Address,
    ) -> None:
        self.config = config
        self.redis = redis
        self.keys = Keys(config.queue)
        self.streams = (self.keys.jobs("high"), self.keys.jobs(), self.keys.jobs("low"))
        self.worker = config.worker
        self.door = door
        self.text = text
        self.ledger = ledger
        self.link: Link  # set by the door, which owns its callbacks
        self.jobs = JobTable()
        self.counters = Counters()
        self.slots = 0
        self.may_read = asyncio.Event()  # a free slot came up, or a drain began
        self.push: Callable[[Job], None]  # to the outbox
        self.next_suspect: Callable[[], None] = lambda: None  # of the pickup
        self.is_draining = False
        self.is_engine_ready = False
        self.is_engine_loading = False
        self.vitals: Mapping[str, float] = {}  # for whoever watches the bus
        self.progress = -1
        self.troubles: dict[str, str] = {}
        self.on_trouble: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ capacity and health

    @property
    def free_slots(self) -> int:
        """How many entries may be read now."""
        if self.is_draining or not self.troubles.keys().isdisjoint(_WORK):
            return 0
        return max(0, self.slots - self.jobs.num_unsettled)

    def check_slots(self) -> None:
        """Wake the reader if there is something to do for it."""
        if self.free_slots > 0 or self.is_draining:
            self.may_read.set()
        else:
            self.may_read.clear()

    def report_trouble(self, part: str, error: ReplyError) -> None:
        """A part of the door cannot do its work: the door is not ready until it can."""
        if self.troubles.get(part) != str(error):
            log.error("redis.refused", part=part, error=str(error))
            self.troubles[part] = str(error)
            self.on_trouble()
            self.check_slots()

    def clear_trouble(self, part: str) -> None:
        """The part works."""
        if self.troubles.pop(part, None) is not None:
            self.on_trouble()
            self.check_slots()

    def clear_when_idle(self) -> None:
        """Redis takes writes again and no job is left that could show it."""
        if not len(self.jobs):
            for part in _WORK:
                self.clear_trouble(part)

    # ------------------------------------------------------------ moves of a job

    def now(self) -> float:
        """Time of the event loop, s."""
        return asyncio.get_running_loop().time()

    def new_lease_end(self, asked_at: float) -> float:
        """When a lease ends by our own clock that was asked for at `asked_at`."""
        return asked_at + self.redis.lease_ms / 1000

    def end(self, job: Job, ending: Ending) -> None:
        """The job's last event goes out after its tokens."""
        job.ending = ending
        job.stage = Stage.ENDING
        job.due = 0.0
        self.push(job)

    def lose(self, job: Job, why: str) -> None:
        """The job is another worker's now: forget it without ack or event."""
        log.warning("job.fenced", job=job.id, attempt=job.attempt, why=why)
        self.counters.fenced += 1
        if job.stage is Stage.RUNNING:
            self.tell_ledger(Drop, job)
        self.forget(job)

    def discard(self, job: Job, error: ReplyError) -> None:
        """A key of the job is not what it should be: out of the queue with it, others wait."""
        log.error("job.discarded", job=job.id, entry=job.entry, error=str(error))
        if job.stage is Stage.RUNNING:
            self.tell_ledger(Drop, job)
        job.in_doubt = False
        job.flight = None
        job.ids, job.texts = [], []
        self.end(job, Ending(dead_reason=str(error), is_discard=True))

    def forget(self, job: Job) -> None:
        """The job has left this door."""
        self.jobs.forget(job)
        self.next_suspect()
        self.check_slots()

    def cancel(self, job: Job) -> None:
        """Somebody wants the job to end."""
        job.is_cancelled = True
        if job.stage is Stage.RUNNING:
            self.tell_ledger(Cancel, job)

    def pause(self, job: Job, wanted: bool) -> None:
        """Stop or resume generation, once."""
        if job.stage is Stage.RUNNING and job.is_paused != wanted:
            job.is_paused = wanted
            self.tell_ledger(Pause if wanted else Unpause, job)

    def tell_ledger(self, what: type[AboutJob], job: Job) -> None:
        """About this job and no other: the id may be that of a later attempt, or of a job of the
        other door, by now.
        """
        self.ledger.tell(what(job.id, door=self.door, attempt=job.attempt))
