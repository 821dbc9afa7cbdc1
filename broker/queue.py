"""Which job goes next: priority with a share that cannot starve, tenants in turn by tokens.

A plain structure that the ledger owns, so that taking a job out (cancel, deadline) and putting it
in are one step with the job's state. Knows jobs only as tickets with a cost in tokens.

Within a priority, tenants take turns by deficit round robin with a quantum of one token: each round
gives every waiting tenant one token to spend, and a job runs when its tenant can pay for it. Rounds
in which nobody can pay are made in one step. So small a quantum lets no tenant save up for a burst.
Between priorities the higher goes first, but a lower one that waits earns `low_share` of the tokens
that pass it by, and goes first when that pays for its next job. Within a tenant the doors take
turns, each with its jobs in the order they came: who waits at one does not wait behind the whole
backlog of another.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from broker.config import QueueConfig
from tokenbus.errors import Busy
from tokenbus.request import Priority

PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
MIN_RETRY_MS, MAX_RETRY_MS = 100, 10_000


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. cost_tokens: prompt and output tokens at most. priority: 0 is high.
    door: where the job came in.
    """

    job: str
    tenant: str
    priority: int
    cost_tokens: int
    door: object = None


class _Line:
    """The jobs of one tenant: a lane for each door that has some, the next door first."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[object, OrderedDict[str, Ticket]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, ticket: Ticket) -> None:
        self._lanes.setdefault(ticket.door, OrderedDict())[ticket.job] = ticket

    def head(self) -> Ticket:
        return next(iter(next(iter(self._lanes.values())).values()))

    def remove(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.door]
        del lane[ticket.job]
        if not lane:
            del self._lanes[ticket.door]

    def take(self, ticket: Ticket) -> None:
        """Remove the head; it is another door's turn."""
        self._lanes.move_to_end(ticket.door)
        self.remove(ticket)


class _Level:
    """The tenants of one priority."""

    def __init__(self) -> None:
        self.waiting: dict[str, _Line] = {}
        self.turns: deque[str] = deque()
        self.deficit_tokens: dict[str, int] = {}
        self.earned_tokens = 0.0  # share of what higher priorities took while this one waited

    def add(self, ticket: Ticket) -> None:
        line = self.waiting.get(ticket.tenant)
        if line is None:
            line = self.waiting[ticket.tenant] = _Line()
            self.turns.append(ticket.tenant)
            self.deficit_tokens[ticket.tenant] = 0
        line.add(ticket)

    def remove(self, ticket: Ticket) -> None:
        line = self.waiting[ticket.tenant]
        line.remove(ticket)
        if not line:
            self._leave(ticket.tenant)

    def can_serve(self, barred: str | None) -> bool:
        """Whether a tenant other than the barred one waits."""
        return len(self.waiting) > (barred in self.waiting)

    def head(self, barred: str | None) -> Ticket:
        """The ticket that `take` would give. Tenants' deficits grow until one can pay."""
        while True:
            needs = []
            for _ in range(len(self.turns)):
                tenant = self.turns[0]
                if tenant != barred:
                    ticket = self.waiting[tenant].head()
                    need = ticket.cost_tokens - self.deficit_tokens[tenant]
                    if need <= 0:
                        return ticket
                    needs.append(need)
                self.turns.rotate(-1)
            rounds = min(needs)
            for tenant in self.turns:
                if tenant != barred:
                    self.deficit_tokens[tenant] += rounds

    def take(self, barred: str | None) -> Ticket:
        ticket = self.head(barred)
        tenant = ticket.tenant
        self.deficit_tokens[tenant] -= ticket.cost_tokens
        line = self.waiting[tenant]
        line.take(ticket)
        if not line:
            self._leave(tenant)
        return ticket

    def _leave(self, tenant: str) -> None:
        """A tenant with nothing to run saves nothing up."""
        del self.waiting[tenant], self.deficit_tokens[tenant]
        self.turns.remove(tenant)
        if not self.waiting:
            self.earned_tokens = 0.0


class FairQueue:
    """Bounded. `admit` refuses; `requeue` does not, for jobs that were admitted before."""

    def __init__(self, config: QueueConfig, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock_s = clock_s
        self._levels = [_Level() for _ in PRIORITIES]
        self._returned: OrderedDict[str, Ticket] = OrderedDict()  # served first
        self._tickets: dict[str, Ticket] = {}
        self._num_by_tenant: dict[str, int] = {}
        self._num_by_priority = [0] * len(PRIORITIES)
        self._taken_s: deque[float] = deque(maxlen=64)  # when the last tickets were taken

    def __len__(self) -> int:
        return len(self._tickets)

    def lengths(self) -> list[int]:
        """How many wait, by priority."""
        return list(self._num_by_priority)

    def oldest(self) -> list[Ticket]:
        """Tickets of which one has waited longest: the first admitted, the first returned."""
        waiting = (self._tickets, self._returned)
        return [next(iter(tickets.values())) for tickets in waiting if tickets]

    def admit(self, ticket: Ticket, *, limited: bool = True) -> int:
        """Put a new job in line; returns how many were there before. Raises Busy at a limit, if it
        is limited.
        """
        position = len(self._tickets)
        if limited:
            self._check_limits(ticket)
        self._levels[ticket.priority].add(ticket)
        self._count(ticket, 1)
        return position

    def _check_limits(self, ticket: Ticket) -> None:
        position = len(self._tickets)
        if position >= self._config.max_queued:
            message = f"the queue holds {position} jobs, its limit"
            raise Busy(message, retry_ms=self.retry_ms())
        limit = self._config.max_queued_per_tenant
        if limit and self._num_by_tenant.get(ticket.tenant, 0) >= limit:
            message = f"tenant {ticket.tenant!r} has {limit} jobs in the queue, its limit"
            raise Busy(message, field="tenant", retry_ms=self.retry_ms())

    def requeue(self, ticket: Ticket) -> None:
        """Put a job that ran before at the front."""
        self._returned[ticket.job] = ticket
        self._count(ticket, 1)

    def remove(self, job: str) -> bool:
        """Take a job out of the line; False if it is not in it."""
        ticket = self._tickets.get(job)
        if ticket is None:
            return False
        if job in self._returned:
            del self._returned[job]
        else:
            self._levels[ticket.priority].remove(ticket)
        self._count(ticket, -1)
        return True

    def pop(self, barred: str | None = None) -> Ticket | None:
        """The next job to run, or None if nothing waits. barred: a tenant whose new jobs may not
        start now.
        """
        if self._returned:
            ticket = self._returned.popitem(last=False)[1]
        elif len(self._tickets) == 1:  # there is nobody to be fair to, and nothing to save up
            (ticket,) = self._tickets.values()
            if ticket.tenant == barred:
                return None
            self._levels[ticket.priority].remove(ticket)
        else:
            level = self._next_level(barred)
            if level is None:
                return None
            ticket = level.take(barred)
            self._earn(ticket)
        self._count(ticket, -1)
        self._taken_s.append(self._clock_s())
        return ticket

    def refund(self, ticket: Ticket, unused_tokens: int) -> None:
        """A job ended short of its cost: its tenant may spend the rest, if it still waits."""
        level = self._levels[ticket.priority]
        if ticket.tenant in level.deficit_tokens:
            level.deficit_tokens[ticket.tenant] += max(0, unused_tokens)

    def retry_ms(self) -> int:
        """When a refused sender should try again: the time in which a tenth of the line moves."""
        if len(self._taken_s) < 2:
            return 1_000
        span_s = self._clock_s() - self._taken_s[0]
        wait_ms = 1000 * span_s / len(self._taken_s) * len(self._tickets) / 10
        return int(min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))

    def _next_level(self, barred: str | None) -> _Level | None:
        levels = [level for level in self._levels if level.can_serve(barred)]
        for level in reversed(levels[1:]):
            if level.earned_tokens >= level.head(barred).cost_tokens:
                return level
        return levels[0] if levels else None

    def _earn(self, taken: Ticket) -> None:
        """What was taken pays for its level's earnings; those below that wait earn their share."""
        own = self._levels[taken.priority]
        own.earned_tokens = max(0.0, own.earned_tokens - taken.cost_tokens)
        for level in self._levels[taken.priority + 1 :]:
            if level.waiting:
                level.earned_tokens += self._config.low_share * taken.cost_tokens

    def _count(self, ticket: Ticket, step: int) -> None:
        if step > 0:
            self._tickets[ticket.job] = ticket
        else:
            del self._tickets[ticket.job]
        self._num_by_priority[ticket.priority] += step
        count = self._num_by_tenant.get(ticket.tenant, 0) + step
        if count:
            self._num_by_tenant[ticket.tenant] = count
        else:
            del self._num_by_tenant[ticket.tenant]
