"""The canonical line of a job: one log line at its end that says all there is to say about it.

Never its prompt and never its answer.
"""

from __future__ import annotations

import structlog

from broker.ledger.job import Job
from broker.messages import Done, Failed

log = structlog.get_logger("broker.ledger")


def log_end(job: Job, event: Done | Failed, door: str) -> None:
    """`job.finished`, or `job.failed` with the error's code as its reason."""
    usage = event.usage if isinstance(event, Done) else job.usage()
    line = log.bind(
        job=job.name,
        door=door,
        attempt=job.attempt,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queue_ms=round(usage.queue_ms, 1),
        ttft_ms=round(usage.ttft_ms, 1),
        total_ms=round(usage.total_ms, 1),
        tok_s=job.tokens_per_s(),
    )
    if isinstance(event, Done):
        line.info("job.finished", reason=event.reason)
    else:
        error = event.error
        line.warning("job.failed", reason=error.code, error=error.message, dead=event.dead)
