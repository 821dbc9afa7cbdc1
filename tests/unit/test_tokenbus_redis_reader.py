"""The reader of reply streams, against a Redis whose answers the test gives one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tokenbus.errors import BusUnavailable, Internal
from tokenbus.redis_reader import RedisReader
from tokenbus.stream import Job

KEY = b"out:j"
STARTED = (
    b"1-0",
    {b"event": b"started", b"worker": b"w", b"seed": b"7", b"prompt_tokens": b"1"},
)


def tokens(seq: int) -> tuple[bytes, dict[bytes, bytes]]:
    """An entry with one token, whose id and text tell its seq."""
    text = b"%d" % seq
    return b"1-" + text, {b"event": b"tokens", b"seq": text, b"ids": b"[%d]" % seq, b"text": text}


class ScriptedRedis:
    """Every XREAD waits for `answer`."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[tuple[dict[bytes, bytes], asyncio.Future[Any]]]
        self._questions = asyncio.Queue()
        self.types: dict[bytes, bytes] = {}

    async def xread(self, streams: dict[bytes, bytes], count: int, block: int) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._questions.put_nowait((dict(streams), answer))
        return await answer

    async def asked(self) -> tuple[dict[bytes, bytes], asyncio.Future[Any]]:
        """The next question: from where each stream is read, and where its answer goes."""
        return await asyncio.wait_for(self._questions.get(), 10.0)

    async def type(self, key: bytes) -> bytes:
        return self.types.get(key, b"none")

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def redis() -> ScriptedRedis:
    return ScriptedRedis()


@pytest.fixture
async def reader(redis: ScriptedRedis) -> AsyncIterator[RedisReader]:
    async def unblock(client_id: int) -> bool:
        return True

    the_reader = RedisReader(redis, "scripted", unblock, 1.0)  # type: ignore[arg-type]
    yield the_reader
    await the_reader.close(BusUnavailable("the test is over"))


def seqs_of(job: Job) -> list[int]:
    """Of the tokens that the job was given."""
    return [event.seq for event in job.pending]


async def test_a_reader_is_given_entries_in_order_and_reads_on_from_the_last(
    redis: ScriptedRedis, reader: RedisReader
) -> None:
    job = Job("j", None)
    reader.add(KEY, job)
    for cursor, entries in ((b"0", [STARTED, tokens(1)]), (b"1-1", [tokens(2)])):
        question, answer = await redis.asked()
        assert question == {KEY: cursor}
        answer.set_result([(KEY, entries)])
    await redis.asked()
    assert seqs_of(job) == [1, 2]


async def test_a_reader_that_came_back_is_not_given_the_answer_to_the_older_question(
    redis: ScriptedRedis, reader: RedisReader
) -> None:
    """The XREAD in flight was asked for a reader that left. What it brings begins in the middle: to
    the new reader that is a hole.
    """
    first, second = Job("j", None), Job("j", None)
    reader.add(KEY, first)
    (await redis.asked())[1].set_result([(KEY, [STARTED, tokens(1)])])
    question, answer = await redis.asked()
    assert question == {KEY: b"1-1"}
    reader.remove(KEY, first)
    reader.add(KEY, second)
    answer.set_result([(KEY, [tokens(2)])])
    question, answer = await redis.asked()
    assert question == {KEY: b"0"}
    assert seqs_of(second) == []
    answer.set_result([(KEY, [STARTED, tokens(1), tokens(2)])])
    await redis.asked()
    assert second.error is None
    assert (seqs_of(first), seqs_of(second)) == ([1], [1, 2])


async def test_a_second_reader_of_a_job_starts_from_the_beginning(
    redis: ScriptedRedis, reader: RedisReader
) -> None:
    first, second = Job("j", None), Job("j", None)
    reader.add(KEY, first)
    (await redis.asked())[1].set_result([(KEY, [STARTED, tokens(1)])])
    _, answer = await redis.asked()
    reader.add(KEY, second)
    answer.set_result([(KEY, [tokens(2)])])
    question, answer = await redis.asked()
    assert question == {KEY: b"0"}
    answer.set_result([(KEY, [STARTED, tokens(1), tokens(2)])])
    await redis.asked()
    assert (seqs_of(first), seqs_of(second)) == ([1, 2], [1, 2])


async def test_a_key_that_is_no_stream_ends_its_own_job_only(
    redis: ScriptedRedis, reader: RedisReader
) -> None:
    bad, good = Job("bad", None), Job("j", None)
    redis.types = {b"out:bad": b"string", KEY: b"stream"}
    reader.add(b"out:bad", bad)
    reader.add(KEY, good)
    (await redis.asked())[1].set_exception(ResponseError("WRONGTYPE Operation against a key"))
    question, answer = await redis.asked()
    assert question == {KEY: b"0"}
    answer.set_result([(KEY, [STARTED, tokens(1)])])
    await redis.asked()
    assert isinstance(bad.error, Internal)
    assert (good.error, seqs_of(good)) == (None, [1])


async def test_a_refusal_that_no_key_explains_is_tried_again(
    redis: ScriptedRedis, reader: RedisReader
) -> None:
    """Somebody has mended the key meanwhile."""
    job = Job("j", None)
    reader.add(KEY, job)
    (await redis.asked())[1].set_exception(ResponseError("WRONGTYPE Operation against a key"))
    question, answer = await redis.asked()
    assert question == {KEY: b"0"}
    answer.set_result([(KEY, [STARTED, tokens(1)])])
    await redis.asked()
    assert (job.error, seqs_of(job)) == (None, [1])
