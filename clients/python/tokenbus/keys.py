"""Every Redis key of tokenbus, once: name, type, content, lifetime. Knows nothing of what workers
do with them.

The braces make the queue's name the hash tag, so all keys of one queue are in one slot of a Redis
Cluster and scripts may touch them together.

| key | type | content | lifetime |
|---|---|---|---|
| `tokenbus:{q}:jobs`, `:jobs:high`, `:jobs:low` | stream, group `workers` | one job an entry | entry deleted when the job ended; never trimmed by length |
| `tokenbus:{q}:out:<job>` | stream | `started`, `tokens`, `done` or `error`; ids `<attempt>-<seq>` | reply TTL after the end (default 1 h); a longer one while running |
| `tokenbus:{q}:job:<job>` | hash | state, attempt, worker, seed, counts, times in server ms | as the out stream |
| `tokenbus:{q}:cancel:<job>` | string `1` | a wish to cancel, seen by whoever picks the job up later | 24 h, set by the client |
| `tokenbus:{q}:idem:<tenant>:<key>` | string | job id that this idempotency key belongs to; `%3A` for `:` in the tenant | 24 h |
| `tokenbus:{q}:control` | stream | `op` = cancel or drain, read by every worker | trimmed to about 1,000 entries |
| `tokenbus:{q}:dead` | stream | jobs given up: whole request, reason, attempts | trimmed to about 10,000 entries |
| `tokenbus:{q}:workers` | hash | worker id -> JSON: server time of the last sign of life, capacity, load, version | a worker removes itself and those silent for 5 min |
"""  # noqa: E501 - table rows

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenbus.errors import InvalidField
from tokenbus.request import Priority

GROUP = "workers"  # consumer group on every jobs stream
CANCEL_TTL_S = 86_400
IDEMPOTENCY_TTL_S = 86_400
CONTROL_MAX_LEN = 1_000

_QUEUE = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one queue. Raises InvalidField for a queue name outside
    [A-Za-z0-9._-]{1,64}.
    """

    queue: str

    def __post_init__(self) -> None:
        if not _QUEUE.match(self.queue):
            message = f"queue {self.queue[:80]!r} is not 1-64 characters of [A-Za-z0-9._-]"
            raise InvalidField(message, field="queue")

    @property
    def prefix(self) -> str:
        """What every key of the queue starts with, colon included."""
        return f"tokenbus:{{{self.queue}}}:"

    def jobs(self, priority: Priority = "normal") -> str:
        """Stream of jobs waiting and running at this priority."""
        return f"{self.prefix}jobs" if priority == "normal" else f"{self.prefix}jobs:{priority}"

    def out(self, job: str) -> str:
        """Stream of one job's events."""
        return f"{self.prefix}out:{job}"

    def job(self, job: str) -> str:
        """Hash with one job's state."""
        return f"{self.prefix}job:{job}"

    def cancel(self, job: str) -> str:
        """String that marks a job as cancelled before anybody picked it up."""
        return f"{self.prefix}cancel:{job}"

    def idempotency(self, tenant: str, key: str) -> str:
        """String that holds the job id an idempotency key stands for. A colon in the tenant is
        written `%3A`, or tenant `a:b` with key `c` would share it with tenant `a` and key `b:c`.
        """
        return f"{self.prefix}idem:{tenant.replace(':', '%3A')}:{key}"

    @property
    def control(self) -> str:
        """Stream of cancel and drain wishes, read by every worker."""
        return f"{self.prefix}control"

    @property
    def dead(self) -> str:
        """Stream of jobs given up."""
        return f"{self.prefix}dead"

    @property
    def workers(self) -> str:
        """Hash of the workers alive."""
        return f"{self.prefix}workers"
