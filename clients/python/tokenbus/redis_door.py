"""The Redis door: jobs by XADD, cancel and status by commands, tokens by a `RedisReader`."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from tokenbus.door import Timeouts
from tokenbus.errors import BusUnavailable, TokenbusError, UnknownJob
from tokenbus.events import JobStatus
from tokenbus.fields import PRIORITIES
from tokenbus.keys import CANCEL_TTL_S, CONTROL_MAX_LEN, Keys
from tokenbus.parse import build_entry
from tokenbus.redis_link import RedisLink, connect
from tokenbus.redis_reader import BLOCK_MS, RedisReader
from tokenbus.request import JobRequest
from tokenbus.stream import Job

_SCAN_ENTRIES = 100_000  # newest entries of each jobs stream that `status` looks through
_PAGE_ENTRIES = 200  # at a time: an entry may have megabytes
_ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}\Z")


class RedisDoor:
    """Two connections: one for commands, one that blocks in XREAD."""

    def __init__(self, url: str, queue: str, timeouts: Timeouts, *, tenant: str = "") -> None:
        self._keys = Keys(queue)
        self._tenant = tenant
        name = urlsplit(url).netloc.rpartition("@")[2] or "unix socket"
        connect_s = timeouts.connect_s / 3
        self._commands = RedisLink(connect(url, timeouts.answer_s / 3, connect_s), name)
        reads = connect(url, BLOCK_MS / 1_000 + 2.0, connect_s)
        self._reader = RedisReader(reads, name, self._unblock, timeouts.give_up_s)
        self._errands: set[asyncio.Task[None]] = set()

    async def open(self, request: JobRequest) -> Job:
        """See `Door`. Returns when Redis has the job."""
        if request.durable:  # every job is, here
            request = replace(request, durable=False)
        fields: dict[Any, Any] = {**build_entry(request)}
        if self._tenant and "tenant" not in fields:
            fields["tenant"] = self._tenant
        fields.pop("priority", None)  # the stream says it
        key = self._keys.jobs(request.priority)
        await self._commands.call(lambda: self._commands.client.xadd(key, fields))
        job = Job(request.job, request)
        job.on_accepted()
        self._reader.add(self._out_key(job.name), job)
        return job

    async def tail(self, name: str, after: int) -> Job:
        """See `Door`."""
        job = Job(name, None, after)
        self._reader.add(self._out_key(job.name), job)
        return job

    async def cancel(self, name: str) -> None:
        """See `Door`. Returns when Redis has the wish; an unknown job is not noticed."""
        client, keys = self._commands.client, self._keys
        fields: dict[Any, Any] = {"op": "cancel", "job": name}
        await self._commands.call(lambda: client.set(keys.cancel(name), "1", ex=CANCEL_TTL_S))
        await self._commands.call(
            lambda: client.xadd(keys.control, fields, maxlen=CONTROL_MAX_LEN, approximate=True)
        )

    async def status(self, name: str) -> JobStatus:
        """See `Door`. Raises BusUnavailable where the queue is too long to say whether the job is
        in it.
        """
        status = await self._recorded(name)
        if status is not None:
            return status
        is_waiting = await self._is_waiting(name)
        if is_waiting:
            return JobStatus(name, "queued")
        status = await self._recorded(name)  # perhaps it was taken meanwhile
        if status is not None:
            return status
        queue = self._keys.queue
        if is_waiting is None:
            message = (
                f"job {name} is not among the newest {_SCAN_ENTRIES:,} of queue {queue}; it may"
                " wait before them"
            )
            raise BusUnavailable(message)
        raise UnknownJob(f"job {name} is not known in queue {queue}", field="job")

    def forget(self, job: Job) -> None:
        """See `Door`."""
        self._reader.remove(self._out_key(job.name), job)

    def abandon(self, job: Job) -> None:
        """See `Door`."""
        self.forget(job)
        if job.request is not None and not job.is_over:
            job.fail(BusUnavailable("the stream was closed"))
            task = asyncio.get_running_loop().create_task(self._cancel_quietly(job.name))
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)

    async def close(self) -> None:
        """See `Door`."""
        await asyncio.gather(*self._errands)
        await self._reader.close(BusUnavailable("the client was closed"))
        await self._commands.close()

    def _out_key(self, name: str) -> bytes:
        return self._keys.out(name).encode()

    async def _unblock(self, client_id: int) -> bool:
        client = self._commands.client
        return bool(await self._commands.call(lambda: client.client_unblock(client_id), 1))

    async def _cancel_quietly(self, name: str) -> None:
        """Cancel for a caller who left; with Redis away the job then runs to its end."""
        try:
            await self.cancel(name)
        except TokenbusError:
            return

    async def _recorded(self, name: str) -> JobStatus | None:
        """What workers wrote of the job, if one had it."""
        client = self._commands.client
        found = await self._commands.call(lambda: client.hgetall(self._keys.job(name)))
        fields = {bytes(k).decode(): bytes(v).decode("utf-8", "replace") for k, v in found.items()}
        if "state" not in fields:
            return None
        status = _status_from_hash(name, fields)
        return status if status.is_over else replace(status, seq=await self._last_seq(name))

    async def _last_seq(self, name: str) -> int:
        """Seq of the last token of a job that runs or waits for another attempt."""
        entries = await self._newest(self._keys.out(name), "+", "-", 1)
        return int(entries[0][0].rpartition(b"-")[2]) if entries else 0

    async def _is_waiting(self, name: str) -> bool | None:
        """Whether the job is in a jobs stream; None if not all of one was looked through."""
        keys = [self._keys.jobs(priority) for priority in PRIORITIES]
        if _ENTRY_ID.match(name):
            for key in keys:
                if await self._newest(key, name, name, 1):
                    return True
        results = [await self._is_in(key, name) for key in keys]
        return True if True in results else None if None in results else False

    async def _is_in(self, key: str, name: str) -> bool | None:
        wanted, newest = name.encode(), "+"
        for _ in range(_SCAN_ENTRIES // _PAGE_ENTRIES):
            entries = await self._newest(key, newest, "-", _PAGE_ENTRIES)
            if any((fields or {}).get(b"job") == wanted for _, fields in entries):
                return True
            if len(entries) < _PAGE_ENTRIES:
                return False
            newest = "(" + entries[-1][0].decode()
        return None

    async def _newest(self, key: str, newest: str, oldest: str, count: int) -> list[Any]:
        """Entries (id, fields) from `newest` back to `oldest`."""
        read = functools.partial(self._commands.client.xrevrange, key, newest, oldest, count=count)
        entries: list[Any] = await self._commands.call(read)
        return entries


def _status_from_hash(name: str, fields: Mapping[str, str]) -> JobStatus:
    return JobStatus(
        job=name,
        state=fields["state"],
        attempt=_number(fields.get("attempt", "")),
        seq=_number(fields.get("completion_tokens", "")),
        worker=fields.get("worker", ""),
        reason=fields.get("reason", ""),
        code=fields.get("code", ""),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
