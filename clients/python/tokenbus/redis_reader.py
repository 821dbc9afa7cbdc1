"""One XREAD loop over the `out` streams of every job that is followed.

The id of the last entry of a stream is its cursor, so a broken connection costs nothing: the loop
reads on from there. A job that is added while the loop blocks in XREAD ends the wait with CLIENT
UNBLOCK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from tokenbus.assemble import Verdict
from tokenbus.entries import event_from_entry
from tokenbus.errors import BusUnavailable, Internal, ProtocolError, TokenbusError
from tokenbus.events import Done, Failed, Started, Tokens
from tokenbus.redis_link import LOST, AnyRedis, close
from tokenbus.retry import Backoff
from tokenbus.stream import Job

BLOCK_MS = 1_000
_BLOCK_WITHOUT_WAKE_MS = 50  # where CLIENT UNBLOCK is not to be had
_WAKE_AGAIN_S = 0.005  # the reader may not have reached the server yet
_COUNT = 512  # entries per stream and read

Entries = list[tuple[bytes, Mapping[bytes, bytes] | None]]


class _Followed:
    """The readers of one stream and how far it was read."""

    def __init__(self) -> None:
        self.cursor: bytes = b"0"
        self.read_from: bytes = b""  # of the XREAD in flight; no cursor is equal to it before one
        self.jobs: list[Job] = []


class RedisReader:
    """Owns `client`, on which nothing else runs. unblock(client id): whether it was blocked."""

    def __init__(
        self,
        client: AnyRedis,
        name: str,
        unblock: Callable[[int], Awaitable[bool]],
        give_up_s: float,
    ) -> None:
        self._client = client
        self._name = name
        self._unblock = unblock
        self._give_up_s = give_up_s
        self._loop = asyncio.get_running_loop()
        self._streams: dict[bytes, _Followed] = {}
        self._added = asyncio.Event()
        self._client_id: int | None = None
        self._can_wake = isinstance(client, Redis)
        self._is_reading = False
        self._has_new = False
        self._is_closed = False
        self._waking: asyncio.Task[None] | None = None
        self._task = self._loop.create_task(self._read_forever())

    def add(self, key: bytes, job: Job) -> None:
        """Follow a job from the start of its stream; what it has already is dropped."""
        followed = self._streams.setdefault(key, _Followed())
        followed.jobs.append(job)
        followed.cursor = b"0"
        self._has_new = True
        self._added.set()
        if self._is_reading and self._can_wake and (self._waking is None or self._waking.done()):
            self._waking = self._loop.create_task(self._wake())

    def remove(self, key: bytes, job: Job) -> None:
        """Stop following a job."""
        followed = self._streams.get(key)
        if followed is None:
            return
        followed.jobs = [other for other in followed.jobs if other is not job]
        if not followed.jobs:
            del self._streams[key]

    async def close(self, error: TokenbusError) -> None:
        """End every stream with `error` and close the connection."""
        self._is_closed = True
        self._added.set()
        tasks = [task for task in (self._task, self._waking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(error)
        await close(self._client)

    async def _read_forever(self) -> None:
        backoff = Backoff()
        lost_since_s: float | None = None
        while not self._is_closed:  # a cancellation may come out of redis-py as a timeout
            await self._added.wait()
            try:
                await self._read_once()
                lost_since_s = None
                backoff.reset()
                continue
            except (*LOST, exceptions.RedisError) as error:
                self._client_id = None
                reason = BusUnavailable(f"Redis ({self._name}): {error}")
            finally:
                self._is_reading = False
            now_s = self._loop.time()
            lost_since_s = now_s if lost_since_s is None else lost_since_s
            if now_s - lost_since_s > self._give_up_s:
                self._fail_all(reason)
            await asyncio.sleep(backoff.next_s())

    async def _read_once(self) -> None:
        if self._can_wake and self._client_id is None:
            try:
                self._client_id = int(await self._client.client_id())
            except exceptions.ResponseError:  # not allowed here
                self._can_wake = False
        if not self._streams:
            self._added.clear()
            return
        streams: dict[Any, Any] = {}
        for key, followed in self._streams.items():
            followed.read_from = streams[key] = followed.cursor
        self._has_new = False
        self._is_reading = True
        block_ms = BLOCK_MS if self._can_wake else _BLOCK_WITHOUT_WAKE_MS
        try:
            reply: Any = await self._client.xread(streams, count=_COUNT, block=block_ms)
        except exceptions.ResponseError as error:
            self._is_reading = False
            if not str(error).startswith("WRONGTYPE") or not await self._drop_others(streams):
                raise
            return
        self._is_reading = False
        for key, entries in reply or ():
            self._on_entries(bytes(key), entries)

    async def _drop_others(self, keys: Iterable[bytes]) -> bool:
        """Fail the jobs whose key is no stream: XREAD of all of them is refused for one. Whether
        there was any.
        """
        found_any = False
        for key in keys:
            answer: Any = await self._client.type(key)
            kind = bytes(answer).decode()
            if kind in ("stream", "none"):
                continue
            found_any = True
            name = key.decode()
            followed = self._streams.pop(key, _Followed())
            for job in followed.jobs:
                job.fail(Internal(f"Redis ({self._name}): {name} is no stream but a {kind}"))
        return found_any

    async def _wake(self) -> None:
        """Have the loop look at its jobs again, as soon as the server can be told."""
        while self._has_new and self._is_reading and self._client_id is not None:
            try:
                if await self._unblock(self._client_id):
                    return
            except TokenbusError:  # not allowed, or Redis is away: the loop wakes by itself
                self._can_wake = False
                return
            await asyncio.sleep(_WAKE_AGAIN_S)

    def _on_entries(self, key: bytes, entries: Entries) -> None:
        followed = self._streams.get(key)
        if followed is None or followed.read_from != followed.cursor:
            return  # a reader came meanwhile: the next read starts over
        for entry_id, fields in entries:
            followed.cursor = entry_id
            for job in followed.jobs:
                _give(job, entry_id.decode(), fields or {})
        for job in [job for job in followed.jobs if job.is_over]:
            self.remove(key, job)

    def _fail_all(self, error: TokenbusError) -> None:
        for followed in self._streams.values():
            for job in followed.jobs:
                job.fail(error)
        self._streams.clear()


def _give(job: Job, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
    """One entry to one reader; an entry that breaks the protocol ends the job for it."""
    try:
        event = event_from_entry(job.name, entry_id, fields)
        verdict = Verdict.NEW
        if isinstance(event, Started):
            job.on_started(event)
        elif isinstance(event, Tokens):
            verdict = job.on_tokens(event)
        elif isinstance(event, Done):
            verdict = job.on_done(event)
        elif isinstance(event, Failed):
            job.on_failed(event)
        if verdict is Verdict.HOLE:
            last = job.assembler.last
            message = f"job {job.name}: entry {entry_id} does not follow seq {last}"
            raise ProtocolError(message, field="seq")
    except TokenbusError as error:
        job.fail(error)
