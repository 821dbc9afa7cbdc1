"""The synchronous twin over both doors."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.integration.fake_worker import FakeWorker
from tests.integration.test_client_redis import Writer, done, started, tokens
from tests.redis_servers import RedisServer
from tokenbus import Client
from tokenbus.errors import EngineLost, InvalidField
from tokenbus.protocol import MessageType as T


def with_worker(script: Callable[[FakeWorker], Coroutine[Any, Any, None]]) -> tuple[str, Any]:
    """Run a scripted worker on a thread; returns its endpoint and the join."""
    endpoint: list[str] = []
    is_bound = threading.Event()

    async def run() -> None:
        async with FakeWorker() as worker:
            endpoint.append(worker.endpoint)
            is_bound.set()
            await script(worker)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    is_bound.wait()
    return endpoint[0], thread


def test_generate_over_zeromq_streams_and_raises_like_the_async_client() -> None:
    async def script(worker: FakeWorker) -> None:
        await worker.expect(T.SUBMIT)
        await worker.accept("a")
        await worker.tokens(("a", 1, [5], "x"))
        await worker.done("a", [5], text="y")
        await worker.expect(T.SUBMIT)
        await worker.accept("b")
        await worker.error(EngineLost("gone"), job="b")
        await worker.settle()

    endpoint, thread = with_worker(script)
    with Client(zmq=endpoint) as client:
        stream = client.generate("p", job="a")
        assert [t.text for t in stream] == ["x", "y"]
        assert stream.done is not None
        with pytest.raises(EngineLost):
            client.generate("p", job="b").text()
        with pytest.raises(InvalidField):
            client.generate("p", top_p=7)
        thread.join()  # the worker settles with a client that is still there


def test_closing_a_stream_cancels_its_job() -> None:
    async def script(worker: FakeWorker) -> None:
        await worker.expect(T.SUBMIT)
        await worker.accept("a")
        await worker.tokens(("a", 1, [5], "x"))
        await worker.expect(T.CANCEL)
        cancelled.set()

    cancelled = threading.Event()
    endpoint, thread = with_worker(script)
    with Client(zmq=endpoint) as client:
        with client.generate("p", job="a") as stream:
            assert next(stream).text == "x"
        assert cancelled.wait(10)
        thread.join()


def test_the_redis_door_streams_submits_and_cancels(shared_redis: RedisServer) -> None:
    writer = Writer(shared_redis, f"q-{uuid.uuid4().hex[:8]}")
    with Client(redis=shared_redis.url, queue=writer.keys.queue) as client:
        job = client.submit("p")
        assert client.status(job).state == "queued"
        writer.add(started(job))
        writer.add(tokens(job, 1, 5, text="a"))
        writer.add(done(job, 5))
        assert client.tail(job).text() == "a"
        client.cancel(job)
        assert writer.redis.get(writer.keys.cancel(job)) == b"1"
    client.close()
