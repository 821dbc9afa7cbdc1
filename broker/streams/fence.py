"""What pickup asks Redis about one job: to reject it, to take it for an attempt, and what earlier
attempts have published.
"""

from __future__ import annotations

from broker.streams.entries import failed_fields, read_chunk
from broker.streams.jobs import Chunk, Job
from broker.streams.lane import Command
from broker.streams.scripts import script
from broker.streams.state import PROGRESS_TOKENS, UNFINISHED_TTL_MS, DoorState
from tokenbus.errors import TokenbusError
from tokenbus.keys import GROUP, IDEMPOTENCY_TTL_S

PAGE_ENTRIES = 1_000


def reject_command(state: DoorState, job: Job, error: TokenbusError) -> Command:
    """End a job that cannot run."""
    keys = state.keys
    return script(
        "reject",
        (keys.job(job.id), keys.out(job.id), job.stream, keys.cancel(job.id)),
        (GROUP, state.worker, job.entry, state.redis.reply_ttl_ms, *failed_fields(error)),
    )


def fence_command(state: DoorState, job: Job, seed: int, *, may_be_suspect: bool) -> Command:
    """Take the job for one attempt. seed: for a job that has none yet. may_be_suspect: it may run
    although it is under suspicion.
    """
    keys, request, redis = state.keys, job.request, state.redis
    hash_key = keys.job(job.id)
    idem, idem_ttl = hash_key, ""
    if request.idempotency_key is not None:
        idem = keys.idempotency(request.tenant, request.idempotency_key)
        idem_ttl = str(IDEMPOTENCY_TTL_S)
    return script(
        "fence",
        (hash_key, keys.out(job.id), job.stream, keys.cancel(job.id), keys.dead, idem),
        (
            *(GROUP, state.worker, job.entry, job.id, seed, job.prompt_tokens),
            *(redis.max_attempts, UNFINISHED_TTL_MS, redis.reply_ttl_ms),
            "" if request.deadline_ms is None else request.deadline_ms,
            *(PROGRESS_TOKENS, idem_ttl, int(may_be_suspect)),
            *(job.fingerprint, int(job.was_asked), redis.dead_max_len, request.tenant),
        ),
    )


async def read_log(state: DoorState, job: Job) -> list[Chunk]:
    """What earlier attempts published; everything before our fence is final. Raises LinkLost or
    ReplyError.
    """
    chunks: list[Chunk] = []
    start = "-"
    while True:
        out = state.keys.out(job.id)
        page = await state.link.call("XRANGE", out, start, "+", "COUNT", PAGE_ENTRIES)
        for entry_id, fields in page:
            chunk = read_chunk(entry_id, fields)
            if chunk is not None:
                chunks.append(chunk)
        if len(page) < PAGE_ENTRIES:
            return chunks
        start = "(" + page[-1][0].decode()
