"""What a caller iterates over: the tokens of one job, from whichever door.

`Job` is the door's side (events in, waiters woken), `JobStream` the caller's. A stream that nobody
reads buffers at most its own job's tokens.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from tokenbus.assemble import Assembler, Verdict
from tokenbus.errors import TokenbusError
from tokenbus.events import Done, Failed, Started, Tokens
from tokenbus.request import JobRequest


class Job:
    """State of one job inside a door. Only the event loop's thread touches it.

    request: None for a job that was submitted elsewhere (`tail`). accepted: resolved when the
    worker, or Redis, took the job. started: set by the first attempt seen.
    """

    def __init__(self, name: str, request: JobRequest | None, after: int = 0) -> None:
        self.name = name
        self.request = request
        self.assembler = Assembler(after, request.have if request else ())
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started: Started | None = None
        self.done: Done | None = None
        self.error: TokenbusError | None = None
        self.pending: deque[Tokens] = deque()
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """The terminal event was seen, or the job was given up."""
        return self.done is not None or self.error is not None

    def on_started(self, event: Started) -> None:
        """A worker has the job."""
        self.started = event
        self.on_accepted()

    def on_accepted(self) -> None:
        """The job is in somebody's hands."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def on_tokens(self, event: Tokens) -> Verdict:
        """Keep the next tokens for the caller; others are dropped."""
        verdict = Verdict.REPEAT if self.is_over else self.assembler.take(event)
        if verdict is Verdict.NEW:
            self.pending.append(event)
            self._changed.set()
        return verdict

    def on_done(self, event: Done) -> Verdict:
        """The end, if no token is missing before it."""
        if self.is_over:
            return Verdict.REPEAT
        try:
            verdict = self.assembler.finish(event)
        except TokenbusError as error:
            self.fail(error)
            return Verdict.NEW
        if verdict is Verdict.NEW:
            if event.text:
                self.pending.append(Tokens(self.name, event.attempt, event.seq + 1, (), event.text))
            self.done = event
            self.on_accepted()
            self._changed.set()
        return verdict

    def on_failed(self, event: Failed) -> None:
        """The end by error."""
        self.fail(event.error)

    def fail(self, error: TokenbusError) -> None:
        """End the job for the caller; the tokens that came before can still be read."""
        if self.is_over:
            return
        self.error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: the stream raises it too
        self._changed.set()

    async def wait(self) -> None:
        """Until there are tokens to read or the job is over."""
        while not self.pending and not self.is_over:
            self._changed.clear()
            await self._changed.wait()


class JobStream:
    """The tokens of one job: `async for token in stream`.

    Yields `Tokens` with `seq`, `ids` and `text`; the texts joined are the answer. Ends after the
    job's `done`, and raises the job's error as a TokenbusError. One reader per stream. A stream of
    `generate` that is closed, or that nobody holds any more (after a `break`), cancels its job.
    """

    def __init__(
        self, name: str, open_job: Callable[[], asyncio.Task[Job]], abandon: Callable[[Job], None]
    ) -> None:
        self.job = name
        self._open_job = open_job
        self._opening: asyncio.Task[Job] | None = None
        self._abandon = abandon

    @property
    def done(self) -> Done | None:
        """Reason, usage and crc once the job has ended well; None before."""
        job = self._state()
        return job.done if job else None

    @property
    def started(self) -> Started | None:
        """Worker, seed and prompt length of the attempt that runs or ran the job; None before."""
        job = self._state()
        return job.started if job else None

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        job = await self._opened()
        await job.wait()
        if job.pending:
            return job.pending.popleft()
        if job.error is not None:
            raise job.error
        raise StopAsyncIteration

    async def next_batch(self) -> list[Tokens]:
        """All events that are there, at least one; empty at the end of the job. Raises the job's
        error.
        """
        job = await self._opened()
        await job.wait()
        if not job.pending and job.error is not None:
            raise job.error
        batch = list(job.pending)
        job.pending.clear()
        return batch

    async def accepted(self) -> None:
        """Submit the job if need be, and wait until it was taken. Raises the refusal."""
        job = await self._opened()
        await asyncio.shield(job.accepted)

    async def text(self) -> str:
        """Everything from here to the end as one string. Raises the job's error."""
        return "".join([token.text async for token in self])

    async def aclose(self) -> None:
        """Stop reading. A job that `generate` submitted and that has not ended is cancelled."""
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            await asyncio.gather(opening, return_exceptions=True)
        job = self._state()
        if job is not None:
            self._abandon(job)

    async def __aenter__(self) -> JobStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _opened(self) -> Job:
        if self._opening is None:
            self._opening = self._open_job()
            self._opening.add_done_callback(self._on_opened_later())
        return await asyncio.shield(self._opening)

    def _on_opened_later(self) -> Callable[[asyncio.Task[Job]], None]:
        """Have the job abandoned when nobody holds this stream any more, without holding it
        ourselves.
        """
        this, abandon, loop = weakref.ref(self), self._abandon, asyncio.get_running_loop()

        def on_collected(job: Job) -> None:
            if not job.is_over and not loop.is_closed():
                loop.call_soon_threadsafe(abandon, job)

        def on_opened(task: asyncio.Task[Job]) -> None:
            if task.cancelled() or task.exception() is not None:
                return
            stream = this()
            if stream is None:
                abandon(task.result())
            else:
                weakref.finalize(stream, on_collected, task.result()).atexit = False

        return on_opened

    def _state(self) -> Job | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()
