"""The ZeroMQ door: many jobs over one connection, carried across reconnects and restarts of the
worker.

After every WELCOME each job that has not ended is picked up again: by RESUME when the worker is the
same process, by SUBMIT with `have` and the same seed when it is a new one.
"""

from __future__ import annotations

import asyncio
import uuid

import zmq

from tokenbus._version import __version__
from tokenbus.bodies import (
    Accepted,
    Hello,
    Welcome,
    done_from_body,
    error_from_body,
    failed_from_body,
    get_str,
    tokens_from_body,
)
from tokenbus.dealer import CurveKeys
from tokenbus.door import Timeouts
from tokenbus.errors import BusUnavailable, Busy, Gone, TokenbusError, UnknownJob, VersionMismatch
from tokenbus.events import JobStatus
from tokenbus.protocol import Message, MessageType
from tokenbus.request import JobRequest
from tokenbus.retry import Backoff
from tokenbus.stream import Job
from tokenbus.zmq_job import ZmqJob, accept, reject
from tokenbus.zmq_questions import Questions, status_from_body
from tokenbus.zmq_session import ZmqSession

DEFAULT_CREDIT = 4_096
_GREETING_S = 5.0
_TICK_S = 1.0


class ZmqDoor:
    """One DEALER connection to one worker's ROUTER."""

    def __init__(
        self,
        endpoint: str,
        timeouts: Timeouts,
        *,
        tenant: str = "",
        credit: int = DEFAULT_CREDIT,
        curve: CurveKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._curve = curve
        agent = f"tokenbus-python/{__version__}"
        self._hello = Hello(f"py-{uuid.uuid4().hex}", credit, tenant=tenant, agent=agent)
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._session: ZmqSession | None = None
        self._boot = ""
        self._worker = ""
        self._jobs: dict[str, list[ZmqJob]] = {}
        self._questions = Questions()
        self._left: set[str] = set()  # to be cancelled, but there was no session
        self._live = asyncio.Event()
        self._fatal: TokenbusError | None = None
        self._task = self._loop.create_task(self._keep_connected())
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    async def open(self, request: JobRequest) -> Job:
        """See `Door`. Raises BusUnavailable without a worker in time, TooLarge over its limits."""
        await self._connected()
        follower = ZmqJob(Job(request.job, request), self._send)
        follower.submit()
        self._left.discard(request.job)
        self._jobs.setdefault(request.job, []).append(follower)
        return follower.job

    async def tail(self, name: str, after: int) -> Job:
        """See `Door`."""
        await self._connected()
        follower = ZmqJob(Job(name, None, after), self._send)
        self._jobs.setdefault(name, []).append(follower)
        follower.resume()
        return follower.job

    async def cancel(self, name: str) -> None:
        """See `Door`. Returns when the job has ended. Raises UnknownJob."""
        await self._ask(MessageType.CANCEL, name)

    async def status(self, name: str) -> JobStatus:
        """See `Door`."""
        return await self._ask(MessageType.STATS, name)

    def forget(self, job: Job) -> None:
        """See `Door`."""
        followers = self._jobs.get(job.name, ())
        for follower in followers:
            if follower.job is job:
                follower.close()
        rest = [follower for follower in followers if follower.job is not job]
        if rest:
            self._jobs[job.name] = rest
        else:
            self._jobs.pop(job.name, None)

    def abandon(self, job: Job) -> None:
        """See `Door`."""
        self.forget(job)
        if job.request is not None and not job.is_over:
            job.fail(BusUnavailable("the stream was closed"))
            if self._session is None or not self._session.is_live:
                self._left.add(job.name)
            self._send(MessageType.CANCEL, {"job": job.name}, [])

    async def close(self) -> None:
        """See `Door`."""
        self._ticker.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(BusUnavailable("the client was closed"))
        await asyncio.to_thread(self._context.term)

    # -------------------------------------------------------------- connection

    async def _connected(self) -> None:
        try:
            await asyncio.wait_for(self._live.wait(), self._timeouts.connect_s)
        except TimeoutError:
            message = f"no worker answers at {self._endpoint}"
            raise self._fatal or BusUnavailable(message) from None
        if self._fatal is not None:
            raise self._fatal

    async def _keep_connected(self) -> None:
        backoff = Backoff()
        silent_since_s = self._loop.time()
        while self._fatal is None:
            session = ZmqSession(
                self._context,
                self._endpoint,
                self._hello,
                self._on_welcome,
                self._on_message,
                self._curve,
            )
            self._session = session
            try:
                session.open(min(_GREETING_S, self._timeouts.connect_s))
                error = await session.lost
                if self._live.is_set():
                    backoff.reset()
                    silent_since_s = self._loop.time()
            finally:
                self._live.clear()
                self._session = None
                session.close()
            if isinstance(error, VersionMismatch):
                self._fatal = error
                self._live.set()
            if self._fatal or self._loop.time() - silent_since_s > self._timeouts.give_up_s:
                self._fail_all(error)
            await asyncio.sleep(backoff.next_s())

    def _on_welcome(self, welcome: Welcome) -> None:
        is_same_worker = welcome.boot == self._boot
        self._boot, self._worker = welcome.boot, welcome.worker
        for follower in self._all_jobs():
            follower.pick_up(is_same_worker)
        for name in self._left:
            self._send(MessageType.CANCEL, {"job": name}, [])
        self._left.clear()
        for kind, name in self._questions.open():
            self._send(kind, {"job": name}, [])
        self._live.set()

    def _send(self, kind: MessageType, body: dict[str, object], blobs: list[bytes]) -> None:
        """Send if there is a session; without one the next WELCOME picks every job up again."""
        if self._session is not None and self._session.is_live:
            self._session.send(kind, body, blobs)

    # -------------------------------------------------------------- messages

    def _on_message(self, message: Message) -> None:
        kind, body = message.type, message.body
        if kind is MessageType.TOKENS:
            self._on_tokens(message)
        elif kind is MessageType.ACCEPTED:
            accepted = Accepted.from_body(body)
            accept(self._jobs.get(accepted.job, ()), accepted, self._worker)
        elif kind is MessageType.REJECTED:
            name = get_str(body, "job")
            reject(self._jobs.get(name, ()), error_from_body(body))
            self._sweep(name)
        elif kind is MessageType.DONE:
            done = done_from_body(body)
            for follower in self._jobs.get(done.job, ()):
                follower.on_done(done)
            status = JobStatus(done.job, "done", done.attempt, done.seq, reason=done.reason)
            self._questions.answer(MessageType.CANCEL, status)
            self._sweep(done.job)
        elif kind is MessageType.ERROR:
            self._on_error(message)
        elif kind is MessageType.STATS and "job" in body:
            self._questions.answer(MessageType.STATS, status_from_body(body))

    def _on_tokens(self, message: Message) -> None:
        events = tokens_from_body(message.body)
        for event in events:
            for follower in self._jobs.get(event.job, ()):
                follower.on_tokens(event)
            if event.job in self._jobs:
                self._sweep(event.job)
        if self._session is not None:
            self._session.use_credit(len(events))

    def _on_error(self, message: Message) -> None:
        """The end of a job, or what the worker has to say to CANCEL, STATS or RESUME."""
        failed = failed_from_body(message.body)
        name, error = failed.job, failed.error
        is_busy = isinstance(error, Busy) and "attempt" not in message.body  # the job is as it was
        is_unwanted = self._questions.is_open(MessageType.CANCEL, name)
        if is_busy or isinstance(error, UnknownJob):
            self._questions.refuse(name, error)
        elif not isinstance(error, Gone):  # that is about a RESUME
            status = JobStatus(name, "failed", failed.attempt, failed.seq, code=error.code)
            self._questions.answer(MessageType.CANCEL, status)
        for follower in self._jobs.get(name, ()):
            if is_busy:
                follower.on_busy(error.retry_ms)
            elif isinstance(error, UnknownJob):
                follower.on_unknown(error, is_unwanted)
            elif follower.is_resuming or not isinstance(error, Gone):
                follower.job.fail(error)
        self._sweep(name)

    async def _ask(self, kind: MessageType, name: str) -> JobStatus:
        await self._connected()
        waiter = self._questions.add(kind, name)
        try:
            self._send(kind, {"job": name}, [])
            return await asyncio.wait_for(waiter, self._timeouts.answer_s)
        except TimeoutError:
            message = f"{self._endpoint} did not answer {kind.name} in time"
            raise BusUnavailable(message) from None
        finally:
            self._questions.remove(kind, name, waiter)

    # -------------------------------------------------------------- jobs

    def _all_jobs(self) -> list[ZmqJob]:
        return [follower for row in self._jobs.values() for follower in row]

    def _fail(self, name: str, error: TokenbusError) -> None:
        for follower in self._jobs.pop(name, ()):
            follower.job.fail(error)

    def _fail_all(self, error: TokenbusError) -> None:
        for name in list(self._jobs):
            self._fail(name, error)
        self._questions.fail_all(error)

    def _tick(self) -> None:
        for follower in self._all_jobs():
            follower.on_tick()
            self._sweep(follower.job.name)
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _sweep(self, name: str) -> None:
        """Forget the readers of a job that have seen its end."""
        for follower in self._jobs.get(name, ()):
            if follower.job.is_over:
                self.forget(follower.job)
