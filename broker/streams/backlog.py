"""How many jobs wait in Redis, and for how long: the part of the queue that no worker has taken.

Every worker of a queue sees the same numbers. Looked up every few seconds with commands that cost
Redis the same whatever the length of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from broker.streams.lane import Command, LinkLost, Reply, ReplyError
from broker.streams.state import DoorState
from tokenbus.fields import PRIORITIES
from tokenbus.keys import GROUP

log = structlog.get_logger("broker.streams")

PERIOD_S = 2.0
RELEASED = b"_released"  # the consumer that holds what workers gave back


@dataclass(frozen=True, slots=True)
class Backlog:
    """waiting: jobs in no worker's hands, by priority. oldest_s: since the oldest of them that no
    worker has seen yet was added. dead: entries in the dead stream.
    """

    waiting: Mapping[str, int]
    oldest_s: float
    dead: int


class BacklogWatch:
    """`seen` is the last look; None before the first, and after a loss of Redis."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self.seen: Backlog | None = None
        self._refusal = ""

    async def run(self) -> None:
        """Look every PERIOD_S, for ever."""
        while True:
            await self._state.link.up.wait()
            try:
                self.seen = await self.look()
                self._refusal = ""
            except LinkLost:  # the link says so itself
                self.seen = None
            except ReplyError as error:
                self.seen = None
                self._note(error)
            await asyncio.sleep(PERIOD_S)

    def _note(self, error: ReplyError) -> None:
        """Say once what Redis refuses; without a group there is nothing to see yet."""
        if not error.is_no_group and self._refusal != str(error):
            self._refusal = str(error)
            log.warning("backlog.unknown", error=str(error))

    async def look(self) -> Backlog:
        """Two round trips. Raises LinkLost, or ReplyError (no group yet, say)."""
        state, streams = self._state, self._state.streams
        commands: list[Command] = [("TIME",), ("XLEN", state.keys.dead)]
        for stream in streams:
            commands += [
                ("XLEN", stream),
                ("XPENDING", stream, GROUP),
                ("XINFO", "GROUPS", stream),
            ]
        replies = _checked(await state.link.run(commands))
        waiting: dict[str, int] = {}
        first: list[Command] = []
        for index, priority in enumerate(PRIORITIES):
            length, pending, groups = replies[2 + 3 * index : 5 + 3 * index]
            waiting[priority] = max(0, int(length) - _num_held(pending))
            first.append(("XRANGE", streams[index], f"({_last_delivered(groups)}", "+", "COUNT", 1))
        heads = _checked(await state.link.run(first))
        now_ms = int(replies[0][0]) * 1000 + int(replies[0][1]) // 1000
        added_ms = [int(head[0][0].partition(b"-")[0]) for head in heads if head]
        oldest_s = max(0.0, (now_ms - min(added_ms)) / 1000) if added_ms else 0.0
        return Backlog(waiting, oldest_s, int(replies[1]))


def _checked(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
    return replies


def _num_held(pending: Reply) -> int:
    """Of an XPENDING summary: entries in workers' hands."""
    consumers = pending[3] or []
    return int(pending[0]) - sum(int(count) for name, count in consumers if name == RELEASED)


def _last_delivered(groups: Reply) -> str:
    """Of XINFO GROUPS: the id up to which entries were handed out; raises ReplyError for none."""
    for group in groups:
        facts = dict(zip(group[::2], group[1::2], strict=True))
        if facts[b"name"] == GROUP.encode():
            return str(facts[b"last-delivered-id"].decode())
    raise ReplyError("NOGROUP the consumer group is not there")
