"""The asynchronous client: one interface over both doors."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypedDict, Unpack

from tokenbus.dealer import CurveKeys
from tokenbus.door import Door, Timeouts
from tokenbus.errors import InvalidField
from tokenbus.events import JobStatus
from tokenbus.fields import read_int, read_job_id
from tokenbus.parse import JOB_FIELDS, MISSPELT, SAMPLING_FIELDS, UNSUPPORTED, parse_submit
from tokenbus.request import MAX_SEED, JobRequest, Priority
from tokenbus.stream import Job, JobStream
from tokenbus.zmq_door import DEFAULT_CREDIT, ZmqDoor

DEFAULT_ZMQ = "tcp://127.0.0.1:5555"


class JobOptions(TypedDict, total=False):
    """Everything a job may say besides its prompt text; see `SamplingParams` and `JobRequest`."""

    messages: list[dict[str, Any]]
    input_ids: list[int]
    job: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    priority: Priority
    deadline_ms: int
    tenant: str
    idempotency_key: str
    durable: bool
    model: str
    queue: str
    have: list[int]


def make_request(prompt: str | None = None, **options: Unpack[JobOptions]) -> JobRequest:
    """A checked job; its id is drawn at random unless given.

    Raises InvalidField, Unsupported or TooLarge naming the field, and TypeError for an unknown one.
    """
    known = {*JOB_FIELDS, *SAMPLING_FIELDS, *UNSUPPORTED, *MISSPELT}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is not a field of a job")
    values: dict[str, Any] = {"prompt": prompt, **options}
    if values.get("job") is None:
        values["job"] = uuid.uuid4().hex
    return parse_submit(values)


class AsyncClient:
    """Jobs and their tokens over one door.

    Give `zmq` (an endpoint) or `redis` (a URL, and the `queue`); with neither, ZeroMQ on this
    host's default port. Connects at the first call. Belongs to the event loop that it was first
    used on.

        async with AsyncClient(redis="redis://localhost") as client:
            async for token in client.generate("The sea is", max_tokens=16):
                print(token.text, end="", flush=True)

    Any number of jobs may run at once. Errors are TokenbusError subclasses, with `code`, `field`
    and `retry`. curve: keys, where the worker asks for them. credit: events in flight over ZeroMQ.
    """

    def __init__(
        self,
        *,
        zmq: str | None = None,
        redis: str | None = None,
        queue: str = "default",
        tenant: str = "",
        timeouts: Timeouts | None = None,
        curve: CurveKeys | None = None,
        credit: int = DEFAULT_CREDIT,
    ) -> None:
        if zmq is not None and redis is not None:
            raise InvalidField("zmq and redis: give one of them", field="redis")
        timeouts = timeouts or Timeouts()
        self._make_door: Callable[[], Door]
        if redis is not None:
            # redis-py takes longer to import than all the rest; ZeroMQ clients do without.
            from tokenbus.redis_door import RedisDoor

            self._make_door = partial(RedisDoor, redis, queue, timeouts, tenant=tenant)
        else:
            endpoint = zmq or DEFAULT_ZMQ
            self._make_door = partial(
                ZmqDoor, endpoint, timeouts, tenant=tenant, credit=credit, curve=curve
            )
        self._door: Door | None = None
        self._is_closed = False

    def generate(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> JobStream:
        """Submit a job and stream its tokens. It is sent when the stream is first read.

        Leaving the loop early cancels the job.
        """
        request = make_request(prompt, **options)
        return self._stream(request.job, lambda: self._open(request))

    def tail(self, job: str, from_seq: int = 0) -> JobStream:
        """Stream a job's tokens after seq `from_seq`, wherever it was submitted, then live.

        `from_seq` is the last seq already seen (0: everything). Closing the stream leaves the job.
        """
        read_job_id("job", job)
        read_int("from_seq", from_seq, 0, MAX_SEED)
        return self._stream(job, lambda: self._tail(job, from_seq))

    async def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> str:
        """Submit a job, wait until it was taken, and return its id.

        Over ZeroMQ it then lives in that worker only; `durable=True`, or Redis, outlives a worker.
        """
        request = make_request(prompt, **options)
        door = self._opened_door()
        job = await door.open(request)
        try:
            await job.accepted
        finally:
            door.forget(job)
        return request.job

    async def cancel(self, job: str) -> None:
        """End a job; its stream gets `done` with reason cancelled. Harmless after the end.

        Raises UnknownJob over ZeroMQ; Redis takes the wish without knowing the job.
        """
        await self._opened_door().cancel(job)

    async def status(self, job: str) -> JobStatus:
        """Where a job stands. Raises UnknownJob."""
        return await self._opened_door().status(job)

    async def close(self) -> None:
        """Free the connections; open streams end with BusUnavailable."""
        self._is_closed = True
        if self._door is not None:
            await self._door.close()
            self._door = None

    async def __aenter__(self) -> AsyncClient:
        self._opened_door()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _stream(self, name: str, open_job: Callable[[], Coroutine[Any, Any, Job]]) -> JobStream:
        def start() -> asyncio.Task[Job]:
            return asyncio.get_running_loop().create_task(open_job())

        return JobStream(name, start, self._abandon)

    async def _open(self, request: JobRequest) -> Job:
        return await self._opened_door().open(request)

    async def _tail(self, job: str, from_seq: int) -> Job:
        return await self._opened_door().tail(job, from_seq)

    def _abandon(self, job: Job) -> None:
        if self._door is not None:
            self._door.abandon(job)

    def _opened_door(self) -> Door:
        if self._is_closed:
            raise InvalidField("the client is closed", field="client")
        if self._door is None:
            self._door = self._make_door()
        return self._door
