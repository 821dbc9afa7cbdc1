"""The synchronous client: the asynchronous one on a thread of its own.

The thread keeps heartbeats and reconnects going while the caller is busy elsewhere; a read hands
over everything that came meanwhile at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar, Unpack

from tokenbus.client import AsyncClient, JobOptions
from tokenbus.dealer import CurveKeys
from tokenbus.door import Timeouts
from tokenbus.events import Done, JobStatus, Started, Tokens
from tokenbus.stream import JobStream
from tokenbus.zmq_door import DEFAULT_CREDIT

T = TypeVar("T")


class Client:
    """Twin of `AsyncClient` for code without an event loop. Safe to use from several threads.

    with Client(redis="redis://localhost") as client:
        for token in client.generate("The sea is", max_tokens=16):
            print(token.text, end="", flush=True)
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
        self._client = AsyncClient(
            zmq=zmq,
            redis=redis,
            queue=queue,
            tenant=tenant,
            timeouts=timeouts,
            curve=curve,
            credit=credit,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tokenbus-client", daemon=True
        )
        self._thread.start()

    def generate(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> SyncStream:
        """See `AsyncClient.generate`."""
        return SyncStream(self._client.generate(prompt, **options), self)

    def tail(self, job: str, from_seq: int = 0) -> SyncStream:
        """See `AsyncClient.tail`."""
        return SyncStream(self._client.tail(job, from_seq), self)

    def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> str:
        """See `AsyncClient.submit`."""
        return self.run(self._client.submit(prompt, **options))

    def cancel(self, job: str) -> None:
        """See `AsyncClient.cancel`."""
        self.run(self._client.cancel(job))

    def status(self, job: str) -> JobStatus:
        """See `AsyncClient.status`."""
        return self.run(self._client.status(job))

    def close(self) -> None:
        """Free the connections and end the thread."""
        if self._loop.is_closed():
            return
        self.run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's thread and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: the coroutine must not run on without a reader
            future.cancel()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SyncStream:
    """The tokens of one job: `for token in stream`. See `JobStream`."""

    def __init__(self, stream: JobStream, client: Client) -> None:
        self._stream = stream
        self._client = client
        self._batch: deque[Tokens] = deque()

    @property
    def job(self) -> str:
        """The job's id."""
        return self._stream.job

    @property
    def done(self) -> Done | None:
        """Reason, usage and crc once the job has ended well; None before."""
        return self._stream.done

    @property
    def started(self) -> Started | None:
        """Worker, seed and prompt length of the attempt; None before."""
        return self._stream.started

    def __iter__(self) -> Iterator[Tokens]:
        return self

    def __next__(self) -> Tokens:
        if not self._batch:
            self._batch.extend(self._client.run(self._stream.next_batch()))
        if not self._batch:
            raise StopIteration
        return self._batch.popleft()

    def accepted(self) -> None:
        """See `JobStream.accepted`."""
        self._client.run(self._stream.accepted())

    def text(self) -> str:
        """See `JobStream.text`."""
        return "".join(token.text for token in self)

    def close(self) -> None:
        """See `JobStream.aclose`."""
        self._client.run(self._stream.aclose())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
