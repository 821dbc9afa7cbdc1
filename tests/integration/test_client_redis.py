"""The Redis client against real servers; the test writes what a worker would."""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import tokenbus.redis_door
from tests.redis_servers import RedisServer
from tokenbus import AsyncClient, Timeouts
from tokenbus.entries import entry_id, event_to_entry
from tokenbus.errors import (
    BusUnavailable,
    Internal,
    InvalidField,
    Poisoned,
    ProtocolError,
    UnknownJob,
)
from tokenbus.events import Done, Event, Failed, JobStatus, Started, Tokens, Usage, crc32_of_ids
from tokenbus.keys import Keys
from tokenbus.parse import parse_entry

FAST = Timeouts(connect_s=5.0, answer_s=5.0, give_up_s=30.0)


class Writer:
    """The worker's side: entries into `out` streams."""

    def __init__(self, server: RedisServer, queue: str) -> None:
        self.keys = Keys(queue)
        self.redis = server.client(decode_responses=False)

    def add(self, event: Event) -> None:
        fields: dict[Any, Any] = {**event_to_entry(event)}
        self.redis.xadd(self.keys.out(event.job), fields, id=entry_id(event))

    def jobs(self, priority: Any = "normal") -> list[tuple[str, dict[bytes, bytes]]]:
        rows: Any = self.redis.xrange(self.keys.jobs(priority))
        return [(entry.decode(), fields) for entry, fields in rows]


def started(job: str, attempt: int = 1) -> Started:
    return Started(job, attempt, "w", 9, 3)


def tokens(job: str, seq: int, *ids: int, text: str, attempt: int = 1) -> Tokens:
    return Tokens(job, attempt, seq, ids, text)


def done(job: str, *ids: int, text: str = "", attempt: int = 1) -> Done:
    return Done(job, attempt, len(ids), "stop", text, Usage(3, len(ids)), crc32_of_ids(ids))


@pytest.fixture
def writer(shared_redis: RedisServer) -> Writer:
    return Writer(shared_redis, f"q-{uuid.uuid4().hex[:8]}")


@pytest.fixture
async def client(shared_redis: RedisServer, writer: Writer) -> AsyncIterator[AsyncClient]:
    queue = writer.keys.queue
    async with AsyncClient(redis=shared_redis.url, queue=queue, timeouts=FAST) as the_client:
        yield the_client


async def until(condition: Callable[[], Any]) -> Any:
    """The condition's value once it is true; the server's state has no event to await."""
    async with asyncio.timeout(10):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


async def test_a_key_that_is_no_stream_ends_its_own_job_only(
    client: AsyncClient, writer: Writer
) -> None:
    writer.redis.set(writer.keys.out("bad"), "x")
    writer.add(started("j"))
    readings = [asyncio.create_task(client.tail(name).text()) for name in ("bad", "j")]
    with pytest.raises(Internal, match="string"):
        await readings[0]
    writer.add(tokens("j", 1, 5, text="a"))
    writer.add(done("j", 5))
    assert await readings[1] == "a"


async def test_a_job_is_an_entry_and_its_tokens_stream_back(
    writer: Writer, client: AsyncClient
) -> None:
    stream = client.generate("p", job="j", max_tokens=3, tenant="t")
    reading = asyncio.create_task(stream.text())
    [(entry, fields)] = await until(writer.jobs)
    request = parse_entry(fields, entry)
    assert (request.job, request.prompt, request.tenant) == ("j", "p", "t")
    writer.add(started("j"))
    writer.add(tokens("j", 1, 5, 6, text="ab"))
    writer.add(tokens("j", 3, 7, text="c"))
    writer.add(done("j", 5, 6, 7, text="!"))
    assert await reading == "abc!"
    assert stream.done is not None
    assert stream.started == started("j")


async def test_a_second_attempt_continues_the_first(writer: Writer, client: AsyncClient) -> None:
    reading = asyncio.create_task(client.tail("j").text())
    writer.add(started("j"))
    writer.add(tokens("j", 1, 5, text="a"))
    writer.add(started("j", attempt=2))
    writer.add(tokens("j", 2, 6, text="b", attempt=2))
    writer.add(done("j", 5, 6, attempt=2))
    assert await reading == "ab"


async def test_the_priority_chooses_the_stream(writer: Writer, client: AsyncClient) -> None:
    for priority in ("high", "normal", "low"):
        job = await client.submit("p", priority=priority)
        [(entry, fields)] = writer.jobs(priority)
        assert parse_entry(fields, entry).job == job


async def test_a_job_added_while_the_reader_blocks_is_read_at_once(
    writer: Writer, client: AsyncClient
) -> None:
    """Without the wake-up it would wait for the end of the block, a second each time."""
    quiet = asyncio.create_task(client.tail("quiet").text())
    await asyncio.sleep(0)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    for number in range(10):
        job = f"j{number}"
        writer.add(started(job))
        writer.add(done(job))
        assert await client.tail(job).text() == ""
    assert clock() - began_s < 5.0
    writer.add(started("quiet"))
    writer.add(done("quiet"))
    await quiet


async def test_one_connection_tails_many_jobs(writer: Writer, client: AsyncClient) -> None:
    names = [f"j{number}" for number in range(60)]
    readings = [asyncio.create_task(client.tail(name).text()) for name in names]
    for name in names:
        writer.add(started(name))
        writer.add(tokens(name, 1, 5, text=name))
        writer.add(done(name, 5))
    assert await asyncio.gather(*readings) == names


async def test_a_tail_from_a_seq_skips_what_was_seen(writer: Writer, client: AsyncClient) -> None:
    writer.add(started("j"))
    for seq in (1, 2, 3):
        writer.add(tokens("j", seq, seq, text=str(seq)))
    writer.add(done("j", 1, 2, 3))
    assert [t.seq async for t in client.tail("j", from_seq=1)] == [2, 3]
    assert await client.tail("j", from_seq=3).text() == ""


async def test_two_readers_of_one_job_see_the_same(writer: Writer, client: AsyncClient) -> None:
    writer.add(started("j"))
    writer.add(tokens("j", 1, 1, text="a"))
    first = client.tail("j")
    assert (await anext(first)).text == "a"
    second = asyncio.create_task(client.tail("j").text())
    writer.add(tokens("j", 2, 2, text="b"))
    writer.add(done("j", 1, 2))
    assert await first.text() == "b"
    assert await second == "ab"


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Failed("j", 1, 0, Poisoned("killed the engine 3 times")), Poisoned),
        (Failed("j", 1, 0, InvalidField("top_p: 7", field="top_p")), InvalidField),
        (Done("j", 1, 0, "stop", "", Usage(), 99), ProtocolError),
        (Done("j", 1, 4, "stop", "", Usage(), 0), ProtocolError),
        (tokens("j", 3, 5, text="a"), ProtocolError),
    ],
)
async def test_an_error_entry_and_a_broken_promise_raise(
    writer: Writer, client: AsyncClient, event: Event, error: type[Exception]
) -> None:
    writer.add(started("j"))
    writer.add(event)
    with pytest.raises(error):
        await client.tail("j").text()


async def test_an_entry_that_is_no_event_fails_its_job_only(
    writer: Writer, client: AsyncClient
) -> None:
    writer.redis.xadd(writer.keys.out("bad"), {"event": "tokens", "ids": "[1"}, id="1-1")
    writer.redis.xadd(writer.keys.out("j"), {"event": "later"}, id="1-0")
    writer.add(done("j"))
    bad = asyncio.create_task(client.tail("bad").text())
    assert await client.tail("j").text() == ""
    with pytest.raises(Exception, match="bad"):
        await bad


async def test_cancel_leaves_the_mark_and_the_wish(writer: Writer, client: AsyncClient) -> None:
    await client.cancel("j")
    assert writer.redis.get(writer.keys.cancel("j")) == b"1"
    assert 0 < writer.redis.ttl(writer.keys.cancel("j")) <= 86_400
    [(_, fields)] = writer.redis.xrange(writer.keys.control)
    assert fields == {b"op": b"cancel", b"job": b"j"}


async def test_leaving_the_loop_early_cancels_the_job(writer: Writer, client: AsyncClient) -> None:
    writer.add(started("j"))
    writer.add(tokens("j", 1, 5, text="a"))
    async for _ in client.generate("p", job="j"):
        break
    gc.collect()
    assert await until(lambda: writer.redis.get(writer.keys.cancel("j"))) == b"1"


async def test_status_reads_the_hash_or_finds_the_waiting_job(
    writer: Writer, client: AsyncClient
) -> None:
    with pytest.raises(UnknownJob):
        await client.status("j")
    await client.submit("p", job="j")
    assert await client.status("j") == JobStatus("j", "queued")
    fields = {"state": "running", "attempt": "2", "worker": "w"}
    writer.redis.hset(writer.keys.job("j"), mapping=fields)
    assert await client.status("j") == JobStatus("j", "running", attempt=2, worker="w")
    writer.add(tokens("j", 7, 5, 6, text="ab", attempt=2))
    assert (await client.status("j")).seq == 8
    ended = {"state": "done", "reason": "stop", "completion_tokens": "8"}
    writer.redis.hset(writer.keys.job("j"), mapping=ended)
    writer.redis.delete(writer.keys.out("j"))
    assert (await client.status("j")).seq == 8


async def test_status_finds_a_job_behind_many_or_says_that_it_cannot_tell(
    writer: Writer, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'prompt', 'p') end"
    key = writer.keys.jobs()
    unnamed = writer.redis.xadd(key, {"prompt": "p"}).decode()  # type: ignore[union-attr]
    await client.submit("p", job="j")
    writer.redis.eval(fill, 1, key, "10100")
    assert await client.status("j") == JobStatus("j", "queued")
    with pytest.raises(UnknownJob):
        await client.status("k")
    monkeypatch.setattr(tokenbus.redis_door, "_SCAN_ENTRIES", 10_000)
    with pytest.raises(BusUnavailable, match="newest 10,000"):
        await client.status("j")
    assert await client.status(unnamed) == JobStatus(unnamed, "queued")


async def test_a_killed_redis_is_read_on_from_the_cursor(redis_server: RedisServer) -> None:
    writer = Writer(redis_server, "q")
    async with AsyncClient(redis=redis_server.url, queue="q", timeouts=FAST) as client:
        stream = client.tail("j")
        writer.add(started("j"))
        writer.add(tokens("j", 1, 5, text="a"))
        assert (await anext(stream)).text == "a"
        redis_server.restart()
        writer = Writer(redis_server, "q")
        writer.add(tokens("j", 1, 5, text="a"))  # the server forgot; the worker rebuilds the stream
        writer.add(tokens("j", 2, 6, text="b"))
        writer.add(done("j", 5, 6))
        assert await stream.text() == "b"


async def test_a_redis_that_stays_away_is_an_error_in_time(redis_server: RedisServer) -> None:
    timeouts = Timeouts(connect_s=0.3, answer_s=0.3, give_up_s=0.3)
    async with AsyncClient(redis=redis_server.url, timeouts=timeouts) as client:
        reading = asyncio.create_task(client.tail("j").text())
        await client.cancel("warm-up")
        redis_server.kill()
        for call in (client.submit("p"), client.cancel("j"), client.status("j"), reading):
            with pytest.raises(BusUnavailable):
                await _within(5, call)


async def test_a_stopped_redis_is_noticed_by_the_socket_timeout(redis_server: RedisServer) -> None:
    timeouts = Timeouts(connect_s=0.6, answer_s=0.6, give_up_s=0.6)
    async with AsyncClient(redis=redis_server.url, timeouts=timeouts) as client:
        await client.cancel("warm-up")
        redis_server.pause()
        try:
            with pytest.raises(BusUnavailable):
                await _within(10, client.submit("p"))
        finally:
            redis_server.resume()


async def test_a_cancelled_call_does_not_leave_its_reply_to_the_next(
    redis_server: RedisServer,
) -> None:
    writer = Writer(redis_server, "q")
    writer.redis.hset(writer.keys.job("a"), mapping={"state": "running", "worker": "a"})
    writer.redis.hset(writer.keys.job("b"), mapping={"state": "running", "worker": "b"})
    async with AsyncClient(redis=redis_server.url, queue="q", timeouts=FAST) as client:
        await client.status("a")
        redis_server.pause()
        hasty = asyncio.create_task(client.status("a"))
        await asyncio.sleep(0.05)
        hasty.cancel()
        redis_server.resume()
        assert (await client.status("b")).worker == "b"


@pytest.mark.parametrize("url", ["http://x", "redis+sentinel://h", "", "redis://h:port"])
async def test_a_bad_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        async with AsyncClient(redis=url):
            pass
    assert caught.value.field == "redis"


async def test_a_client_without_client_unblock_still_reads(
    redis_server: RedisServer,
) -> None:
    """Some servers forbid CLIENT; the reader then blocks for shorter times."""
    writer = Writer(redis_server, "q")
    writer.redis.execute_command("ACL", "SETUSER", "default", "-client")
    async with AsyncClient(redis=redis_server.url, queue="q", timeouts=FAST) as client:
        first = asyncio.create_task(client.tail("first").text())
        await asyncio.sleep(0.05)
        for job in ("second", "first"):
            writer.add(started(job))
            writer.add(done(job))
        assert await client.tail("second").text() == ""
        assert await first == ""


async def _within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work
