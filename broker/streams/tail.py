"""Reading what is new in streams: the one blocking XREAD that several parts of the door repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from broker.streams.intake import BLOCK_MARGIN_S
from broker.streams.lane import Lane, LinkLost, Reply, ReplyError
from broker.streams.state import RETRY_S, DoorState

BadKeys = Callable[[], Awaitable[int]]


async def read_new(
    state: DoorState,
    lane: Callable[[], Lane],
    part: str,
    cursors: Mapping[str, str],
    count: int,
    drop_bad_keys: BadKeys | None = None,
) -> list[Reply]:
    """Streams that have entries after their cursors, with at most `count` of them each; waits
    block_ms for the first.

    Empty after a failed read too: trouble is reported as that of `part`, and a moment is waited.
    One key that is no stream makes Redis refuse to read all of them: drop_bad_keys leaves those
    out and returns how many there were.
    """
    block_ms = state.redis.block_ms
    try:
        reply = await lane().call(
            *("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS"),
            *cursors,
            *cursors.values(),
            timeout_s=block_ms / 1000 + BLOCK_MARGIN_S,
        )
    except LinkLost:
        await asyncio.sleep(0.01)
    except ReplyError as error:
        if drop_bad_keys is not None and error.is_about_one_job and await drop_bad_keys():
            return []
        if not error.is_no_group:
            state.report_trouble(part, error)
        await asyncio.sleep(RETRY_S)
    else:
        state.clear_trouble(part)
        return reply or []
    return []
