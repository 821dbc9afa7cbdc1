"""Reply streams that the other door follows. The cursor of each is its last entry id, so a lost
connection repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from broker.messages import Accepted, Address, Done, Event, Failed, Publish, Tokens
from broker.streams.intake import IDLE_PING_S
from broker.streams.lane import LinkLost, Reply, ReplyError
from broker.streams.link import wait_for
from broker.streams.state import DoorState
from broker.streams.tail import read_new
from tokenbus import events
from tokenbus.entries import event_from_entry
from tokenbus.errors import BadFrame, Internal

log = structlog.get_logger("broker.streams")

ENTRIES_PER_READ = 64


@dataclass(slots=True)
class _Followed:
    """A reply stream that somebody follows. after: tokens up to this seq are known to the door."""

    door: Address
    after: int
    cursor: str = "0-0"
    is_accepted: bool = False
    is_paused: bool = False


class FollowedReplies:
    """One task, `run`, reads all of them."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self._followed: dict[str, _Followed] = {}
        self._wake = asyncio.Event()

    def add(self, job: str, door: Address, after: int) -> None:
        """Tell `door` about the job from the token after seq `after` on."""
        self._followed[job] = _Followed(door, after)
        self._wake.set()

    def pause(self, job: str, wanted: bool) -> bool:
        """Read no more of this stream for now, or again; False if nothing changed."""
        followed = self._followed.get(job)
        if followed is None or followed.is_paused == wanted:
            return False
        followed.is_paused = wanted
        self._wake.set()
        return True

    def drop(self, job: str) -> None:
        """Nobody follows the job any more."""
        self._followed.pop(job, None)

    async def run(self) -> None:
        """Follow the reply streams, for ever."""
        state = self._state
        while True:
            await state.link.up.wait()
            active = {job: f for job, f in self._followed.items() if not f.is_paused}
            if not active:
                await self._idle()
                continue
            names = {state.keys.out(job): job for job in active}
            new = await read_new(
                state,
                lambda: state.link.relay,
                "follow",
                {name: active[job].cursor for name, job in names.items()},
                ENTRIES_PER_READ,
                partial(self._drop_bad, active),
            )
            for name, entries in new:
                job = names[name.decode()]
                if self._followed.get(job) is active[job]:  # and not from elsewhere by now
                    self._deliver(job, active[job], entries)

    async def _drop_bad(self, active: Mapping[str, _Followed]) -> int:
        """Follow no more what is no reply stream; how many those were."""
        commands = [("XLEN", self._state.keys.out(job)) for job in active]
        try:
            replies = await self._state.link.relay.run(commands)
        except LinkLost:
            return 0
        num_bad = 0
        for (job, followed), reply in zip(active.items(), replies, strict=True):
            if isinstance(reply, ReplyError) and reply.is_about_one_job:
                num_bad += 1
                log.error("relay.bad_key", job=job, error=str(reply))
                if self._followed.get(job) is followed:
                    self.drop(job)
                    failed = Failed(job, 0, followed.after, Internal("the reply is damaged"))
                    followed.door.tell(Publish([failed]))
        return num_bad

    async def _idle(self) -> None:
        """Wait for something to follow, without letting the server close the lane meanwhile."""
        self._wake.clear()
        if not await wait_for(self._wake, IDLE_PING_S):
            with suppress(LinkLost):
                await self._state.link.relay.run([("PING",)])

    def _deliver(self, job: str, followed: _Followed, entries: list[Reply]) -> None:
        out: list[Event] = []
        for entry, fields in entries:
            followed.cursor = entry.decode()
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            try:
                event = event_from_entry(job, followed.cursor, values)
            except BadFrame as error:
                log.error("relay.bad_entry", job=job, entry=followed.cursor, error=str(error))
                out.append(Failed(job, 0, followed.after, Internal("the reply is damaged")))
                self.drop(job)
                break
            if isinstance(event, events.Started):
                self._accept(followed, event)
            elif isinstance(event, events.Tokens):
                out.extend(_new_part(event, followed))
            elif event is not None:
                out.append(_end_of(event))
                self.drop(job)
        if out:
            followed.door.tell(Publish(out))

    def _accept(self, followed: _Followed, event: events.Started) -> None:
        if not followed.is_accepted:
            followed.is_accepted = True
            answer = Accepted(event.job, event.attempt, event.seed, event.prompt_tokens)
            followed.door.tell(answer)


def _new_part(event: events.Tokens, followed: _Followed) -> list[Event]:
    """What the door does not know yet. An entry that it knows in part comes whole: text cannot be
    cut by token.
    """
    if event.last_seq <= followed.after:
        return []
    followed.after = event.last_seq
    return [Tokens(event.job, event.attempt, event.seq, event.ids, event.text)]


def _end_of(event: Done | events.Failed) -> Event:
    if isinstance(event, events.Failed):
        return Failed(event.job, event.attempt, event.seq, event.error)
    return event
