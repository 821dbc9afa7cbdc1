"""The ZeroMQ door of a real broker process before a real engine process with the fake model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.config import QueueConfig, ZmqConfig
from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from tests.integration.worker import Worker, make_worker, running
from tests.integration.zmq_raw import RawClient, Reply, letters_of
from tokenbus.client import AsyncClient
from tokenbus.protocol import MessageType, encode_trusted

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = 512
VECTORS = Path(__file__).resolve().parents[1] / "vectors"
T = MessageType


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    config = ZmqConfig("", heartbeat_ms=300, gone_ms=1_500, log_tokens_per_job=64)
    fake = FakeModel(vocab_size=VOCAB, step_ms=1.0, max_model_len=2048)
    async with running(make_worker(directory, fake=fake, zmq=config, max_num_seqs=8)) as worker:
        yield worker


def prompt_ids(text: str) -> list[int]:
    return [b % VOCAB for b in text.encode()]


def expect(text: str, count: int) -> list[int]:
    return expected_tokens(prompt_ids(text), count, VOCAB)


def check(reply: Reply, ids: list[int]) -> None:
    assert reply.ids == ids
    assert reply.text == letters_of(ids)
    assert reply.end is not None
    assert (reply.end.type, reply.body.get("reason")) == (T.DONE, "length")


# ------------------------------------------------------------ the plain way


async def test_a_job_streams_its_tokens_and_ends_once(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        welcome = await client.hello()
        assert (welcome["version"], welcome["models"]) == (1, ["fake"])
        reply = await client.run(prompt="hello", max_tokens=20)
        check(reply, expect("hello", 20))
        assert reply.accepted is not None
        assert reply.accepted["prompt_tokens"] == 5
        assert reply.body["usage"]["completion_tokens"] == 20


async def test_many_jobs_of_one_client_share_one_message_a_step(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        jobs = [await client.submit(prompt=f"job {i}", max_tokens=30) for i in range(16)]
        replies = await client.collect(*jobs)
        for i, job in enumerate(jobs):
            check(replies[job], expect(f"job {i}", 30))
        messages = [m for m in client.messages if m.type is T.TOKENS]
        events = sum(len(m.body["events"]) for m in messages)
        assert events / len(messages) > 4


async def test_the_python_client_works_on_this_door(worker: Worker) -> None:
    async with AsyncClient(zmq=worker.endpoint) as client:
        texts = await asyncio.gather(*(_text(client, f"p{i}") for i in range(4)))
    assert texts == [letters_of(expect(f"p{i}", 12)) for i in range(4)]


async def _text(client: AsyncClient, prompt: str) -> str:
    return "".join([t.text async for t in client.generate(prompt, max_tokens=12)])


async def test_a_large_prompt_comes_in_a_blob(worker: Worker) -> None:
    ids = [i % VOCAB for i in range(1500)]
    blob = b"".join(i.to_bytes(4, "little") for i in ids)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        reply = await client.run(input_ids_blob=0, max_tokens=4, blobs=[blob])
        assert reply.ids == expected_tokens(ids, 4, VOCAB)


async def test_stop_strings_cut_the_text_and_count_the_token(worker: Worker) -> None:
    ids = expect("stop me", 40)
    text = letters_of(ids)
    stop = text[10:13]
    end = text.index(stop)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        reply = await client.run(prompt="stop me", max_tokens=40, stop=[stop])
        assert (reply.text, reply.body["reason"]) == (text[:end], "stop")
        assert reply.ids == ids[: end + 3]


async def test_a_job_continues_from_the_ids_the_client_has(worker: Worker) -> None:
    ids = expect("go on", 20)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="go on", max_tokens=20, have=ids[:7], seed=1)
        accepted = await client.receive(T.ACCEPTED, job=job)
        assert accepted.body["seq"] == 7
        events: list[Any] = []
        while not events or events[-1][2] + len(events[-1][3]) - 1 < 20:
            events += (await client.receive(T.TOKENS)).body["events"]
        assert events[0][2] == 8
        assert [i for e in events for i in e[3]] == ids[7:]
        assert "".join(e[4] for e in events) == letters_of(ids[7:])


# ------------------------------------------------------------ bad input

BAD_SUBMITS: list[tuple[str, dict[str, Any], str, str]] = [
    ("empty prompt", {"prompt": ""}, "invalid", "prompt"),
    ("no prompt", {}, "invalid", "prompt"),
    ("two prompts", {"prompt": "a", "input_ids": [1]}, "invalid", "input_ids"),
    ("prompt too long", {"prompt": "x" * 2048}, "too_long", "prompt"),
    ("id out of range", {"input_ids": [1, VOCAB]}, "invalid", "input_ids[1]"),
    ("negative id", {"input_ids": [-1]}, "invalid", "input_ids[0]"),
    ("bool as id", {"input_ids": [True]}, "invalid", "input_ids[0]"),
    ("string as number", {"prompt": "a", "max_tokens": "16"}, "invalid", "max_tokens"),
    ("float as integer", {"prompt": "a", "max_tokens": 1.5}, "invalid", "max_tokens"),
    ("zero tokens", {"prompt": "a", "max_tokens": 0}, "invalid", "max_tokens"),
    ("temperature below 0", {"prompt": "a", "temperature": -1}, "invalid", "temperature"),
    ("NaN", {"prompt": "a", "temperature": float("nan")}, "invalid", "temperature"),
    ("infinite", {"prompt": "a", "top_p": float("inf")}, "invalid", "top_p"),
    ("beyond 2^53", {"prompt": "a", "seed": 2**60}, "invalid", "seed"),
    ("top_p 0", {"prompt": "a", "top_p": 0}, "invalid", "top_p"),
    ("messages not an array", {"messages": "hi"}, "invalid", "messages"),
    ("no messages", {"messages": []}, "invalid", "messages"),
    ("message without content", {"messages": [{"role": "user"}]}, "invalid", "messages[0].content"),
    (
        "unknown role",
        {"messages": [{"role": "alien", "content": "x"}]},
        "invalid",
        "messages[0].role",
    ),
    (
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]},
        "unsupported",
        "messages[0].content[0].type",
    ),
    ("stop is a map", {"prompt": "a", "stop": {}}, "invalid", "stop"),
    (
        "stop id out of range",
        {"prompt": "a", "stop_token_ids": [VOCAB]},
        "invalid",
        "stop_token_ids[0]",
    ),
    ("unknown model", {"prompt": "a", "model": "gpt-9"}, "unknown_model", "model"),
    ("unknown queue", {"prompt": "a", "queue": "nightly"}, "unknown_queue", "queue"),
    ("bad queue", {"prompt": "a", "queue": "a b"}, "invalid", "queue"),
    ("unknown priority", {"prompt": "a", "priority": "urgent"}, "invalid", "priority"),
    ("a penalty of 0", {"prompt": "a", "repetition_penalty": 0}, "invalid", "repetition_penalty"),
    ("a penalty over 2", {"prompt": "a", "presence_penalty": 2.5}, "invalid", "presence_penalty"),
    ("no number", {"prompt": "a", "frequency_penalty": "1"}, "invalid", "frequency_penalty"),
    ("logprobs", {"prompt": "a", "logprobs": 5}, "unsupported", "logprobs"),
    ("n", {"prompt": "a", "n": 2}, "unsupported", "n"),
    ("a key", {"prompt": "a", "idempotency_key": "k"}, "unsupported", "idempotency_key"),
    ("durable without Redis", {"prompt": "a", "durable": True}, "unsupported", "durable"),
    ("a blob that is not there", {"input_ids_blob": 0}, "invalid", "input_ids_blob"),
    ("have without seed", {"prompt": "a", "have": [1]}, "invalid", "seed"),
    ("deadline 0", {"prompt": "a", "deadline_ms": 0}, "invalid", "deadline_ms"),
]


async def test_each_bad_submit_is_refused_by_name_and_nothing_else_notices(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as good, RawClient(worker.endpoint) as bad:
        await good.hello()
        await bad.hello()
        job = await good.submit(prompt="undisturbed", max_tokens=200)
        for name, body, code, field in BAD_SUBMITS:
            reply = await bad.run(**body)
            assert reply.end is not None
            said = (reply.end.type, reply.body["code"], reply.body.get("field"))
            assert said == (T.REJECTED, code, field), name
            assert reply.body["retry"] is False
        check(await bad.run(prompt="still here", max_tokens=5), expect("still here", 5))
        replies = await good.collect(job)
        check(replies[job], expect("undisturbed", 200))


async def test_a_job_id_that_is_no_id_is_an_error_about_the_message(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        for job in ("", "a b", 5, None, "x" * 129):
            await client.send(T.SUBMIT, job=job, prompt="a")
            body = (await client.receive(T.ERROR, T.REJECTED)).body
            assert (body["code"], body["field"]) == ("invalid", "job")


async def test_every_malformed_vector_is_answered_with_its_code(worker: Worker) -> None:
    vectors = json.loads((VECTORS / "malformed.json").read_text())
    cases = vectors["cases"] if isinstance(vectors, dict) else vectors
    tried = 0
    for case in cases:
        if case.get("limits"):
            continue
        frames = [bytes.fromhex(frame) for frame in case["frames"]]
        if not frames:
            continue  # nothing that a socket could send
        async with RawClient(worker.endpoint) as client:
            await client.hello()
            await client.send_frames(frames)
            answer = await client.receive(T.ERROR)
            assert answer.body["code"] == case["code"], case
            check(await client.run(prompt="alive", max_tokens=2), expect("alive", 2))
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("size_mib", [2, 17, 33])
async def test_sizes_over_the_limit_are_answered_in_words(worker: Worker, size_mib: int) -> None:
    blob = bytes(size_mib << 20)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        head = encode_trusted(T.SUBMIT, {})[0]
        await client.send_frames([head, blob])
        assert (await client.receive(T.ERROR)).body["code"] == "too_large"
        if size_mib > 16:
            job = await client.submit(input_ids_blob=0, blobs=[blob])
            assert (await client.receive(T.ERROR, T.REJECTED)).body["code"] == "too_large"
            assert job
        check(await client.run(prompt="alive", max_tokens=2), expect("alive", 2))


async def test_a_garbage_sender_is_muted_and_the_others_are_not(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as noisy, RawClient(worker.endpoint) as calm:
        await noisy.hello()
        await calm.hello()
        for _ in range(10):
            await noisy.send_frames([b"junk", b"\xc1"])
            assert (await noisy.receive(T.ERROR)).body["code"] == "bad_frame"
        await noisy.submit(prompt="anyone?", max_tokens=1)
        check(await calm.run(prompt="calm", max_tokens=5), expect("calm", 5))
        with pytest.raises(TimeoutError):
            await noisy.next(timeout_s=0.2)


async def test_a_message_before_hello_is_no_session(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.submit(prompt="a")
        assert (await client.receive(T.ERROR)).body["code"] == "no_session"
        await client.hello()
        check(await client.run(prompt="a", max_tokens=2), expect("a", 2))


async def test_hello_is_checked(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        for body, code, field in (
            ({"client": "short", "credit": 1}, "invalid", "client"),
            ({"client": client.name, "credit": -1}, "invalid", "credit"),
            ({"client": client.name, "credit": 1, "tenant": 5}, "invalid", "tenant"),
            ({"client": client.name, "credit": 1, "versions": [2]}, "version", "versions"),
        ):
            await client.send(T.HELLO, **body)
            answer = (await client.receive(T.ERROR)).body
            assert (answer["code"], answer["field"]) == (code, field)


# ------------------------------------------------------------ cancel, resume, repeat


async def test_cancel_of_a_running_a_finished_and_an_unknown_job(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="long", max_tokens=2000)
        await client.receive(T.TOKENS)
        await client.send(T.CANCEL, job=job)
        done = await client.receive(T.DONE, T.ERROR)
        assert (done.body["job"], done.body["reason"]) == (job, "cancelled")
        await client.send(T.CANCEL, job=job)
        again = await client.receive(T.DONE, T.ERROR)
        assert again.body == done.body
        await client.send(T.CANCEL, job="nobody")
        answer = await client.receive(T.DONE, T.ERROR)
        assert (answer.body["code"], answer.body["job"]) == ("not_found", "nobody")


async def test_cancel_from_another_client_ends_a_queued_job(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client, RawClient(worker.endpoint) as other:
        await client.hello()
        await other.hello()
        running_jobs = [await client.submit(prompt=f"r{i}", max_tokens=300) for i in range(10)]
        queued = await client.submit(prompt="queued", max_tokens=300)
        await client.receive(T.ACCEPTED, job=queued)
        await other.send(T.CANCEL, job=queued)
        done = await client.receive(T.DONE, job=queued)
        assert (done.body["reason"], done.body["seq"]) == ("cancelled", 0)
        for job in running_jobs:
            await client.send(T.CANCEL, job=job)


async def test_resume_from_every_seq_gives_the_rest_and_the_end(worker: Worker) -> None:
    ids = expect("again", 25)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="again", max_tokens=25)
        await client.collect(job)
        for after in range(26):
            await client.send(T.RESUME, job=job, after=after)
            rest, text = [], ""
            while (message := await client.receive(T.TOKENS, T.DONE)).type is T.TOKENS:
                for _, _, seq, more, piece in message.body["events"]:
                    assert seq == after + len(rest) + 1
                    rest += more
                    text += piece
            assert rest == ids[after:]
            assert text == letters_of(ids[after:])
            assert message.body["reason"] == "length"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"after": 99}, "gone", "after"),
        ({"after": -1}, "invalid", "after"),
        ({"after": "1"}, "invalid", "after"),
        ({}, "invalid", "after"),
        ({"job": "nobody", "after": 0}, "not_found", "job"),
    ],
)
async def test_a_bad_cursor_is_a_typed_error_and_no_replay(
    worker: Worker, body: dict[str, Any], code: str, field: str
) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="cursor", max_tokens=5)
        await client.collect(job)
        await client.send(T.RESUME, **{"job": job, **body})
        answer = await client.next()
        assert answer.type is T.ERROR
        assert (answer.body["code"], answer.body["field"]) == (code, field)


async def test_a_client_that_reconnects_resumes_where_it_was(worker: Worker) -> None:
    """Its credit is spent when it leaves, so it has seen all that was sent: however slow it is, the
    log still has what comes next.
    """
    ids = expect("reconnect", 400)
    async with RawClient(worker.endpoint) as first:
        await first.hello(credit=5)
        job = await first.submit(prompt="reconnect", max_tokens=400)
        seen: list[int] = []
        for _ in range(5):
            ((_, _, _, more, _),) = (await first.receive(T.TOKENS)).body["events"]
            seen += more
        name = first.name
    async with RawClient(worker.endpoint, name) as second:
        await second.hello()
        await second.send(T.RESUME, job=job, after=len(seen))
        reply = Reply(ids=seen, text=letters_of(seen))
        while reply.end is None:
            message = await second.next()
            if message.type is T.TOKENS:
                for _, _, seq, more, text in message.body["events"]:
                    assert seq == len(reply.ids) + 1
                    reply.ids += more
                    reply.text += text
            elif message.type is T.DONE:
                reply.end = message
        check(reply, ids)


async def test_the_same_submit_again_attaches_and_another_content_conflicts(
    worker: Worker,
) -> None:
    ids = expect("twice", 30)
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        job = await client.submit(prompt="twice", max_tokens=30)
        await client.collect(job)
        await client.submit(job, prompt="twice", max_tokens=30)
        check((await client.collect(job))[job], ids)
        await client.submit(job, prompt="other", max_tokens=30)
        rejected = await client.receive(T.REJECTED)
        assert (rejected.body["code"], rejected.body["field"]) == ("conflict", "job")


@pytest.mark.parametrize("text", ["race", ""], ids=["taken", "refused"])
async def test_two_clients_with_one_job_are_both_answered_and_both_hear_the_end(
    worker: Worker, text: str
) -> None:
    """One job id, one content, at once, again and again: whoever was first is not left waiting."""
    async with RawClient(worker.endpoint) as one, RawClient(worker.endpoint) as two:
        await one.hello()
        await two.hello()
        for i in range(30):
            job = f"same-{text}-{i}"
            for client in (one, two) if i % 2 else (two, one):
                await client.submit(job, prompt=text and f"{text} {i}", max_tokens=40)
            replies = await asyncio.gather(*(_follow(client, job) for client in (one, two)))
            for reply in replies:
                if text:
                    check(reply, expect(f"{text} {i}", 40))
                    assert reply.accepted is not None
                else:
                    assert reply.body["code"] == "invalid"


async def test_a_running_job_asked_for_again_elsewhere_is_whole_for_both(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as one, RawClient(worker.endpoint) as two:
        await one.hello()
        await two.hello()
        job = await one.submit(prompt="late", max_tokens=60)
        await one.receive(T.TOKENS)
        await two.submit(job, prompt="late", max_tokens=60)
        check(await _follow(two, job), expect("late", 60))
        done = await one.receive(T.DONE, job=job)
        assert done.body["seq"] == 60
        await one.send(T.RESUME, job=job, after=0)
        check((await one.collect(job))[job], expect("late", 60))


async def test_a_job_goes_on_for_one_client_when_the_other_is_gone(worker: Worker) -> None:
    """The one that has its stream falls silent; who asked before it gets the stream."""
    async with RawClient(worker.endpoint) as one:
        await one.hello()
        job = await one.submit(prompt="stay", max_tokens=1_900)
        async with RawClient(worker.endpoint) as two:
            await two.hello(credit=1)
            await two.submit(job, prompt="stay", max_tokens=1_900)
            await two.receive(T.TOKENS)
        reply = await _follow(one, job)
        check(reply, expect("stay", 1_900))


async def test_a_cancel_is_answered_by_the_end_whosever_job_it_is(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as one, RawClient(worker.endpoint) as two:
        await one.hello()
        await two.hello()
        job = await one.submit(prompt="theirs", max_tokens=1_500)
        await one.receive(T.TOKENS)
        await two.send(T.CANCEL, job=job)
        for client in (one, two):
            done = await client.receive(T.DONE, job=job)
            assert done.body["reason"] == "cancelled"


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_cancel_in_a_new_session_is_answered_without_resume(
    worker: Worker, has_ended: bool
) -> None:
    async with RawClient(worker.endpoint) as first:
        await first.hello(credit=1)
        job = await first.submit(prompt="again", max_tokens=5 if has_ended else 1_500)
        await first.receive(T.TOKENS)
        name = first.name
        if has_ended:
            await _until_state(first, job, "done")
    async with RawClient(worker.endpoint, name) as second:
        await second.hello()
        await second.send(T.CANCEL, job=job)
        done = await second.receive(T.DONE, job=job)
        assert done.body["reason"] == ("length" if has_ended else "cancelled")


async def _follow(client: RawClient, job: str) -> Reply:
    """As a client does: repeats are dropped, and a hole is asked for. Every token is a letter."""
    reply = Reply()
    while reply.end is None:
        message = await client.next()
        body = message.body
        for name, _, seq, ids, text in body.get("events", ()):
            num_known = len(reply.ids) + 1 - seq
            if name == job and num_known >= 0:
                reply.ids += ids[num_known:]
                reply.text += text[num_known:]
        if body.get("job") != job:
            continue
        if message.type is T.ACCEPTED:
            reply.accepted = body
        elif message.type is T.DONE and body["seq"] > len(reply.ids):
            await client.send(T.RESUME, job=job, after=len(reply.ids))
        else:
            reply.end = message
            reply.text += body.get("text", "")
    return reply


async def test_the_newest_hello_of_a_name_owns_its_jobs(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as old:
        await old.hello()
        job = await old.submit(prompt="mine", max_tokens=300)
        await old.receive(T.TOKENS)
        async with RawClient(worker.endpoint, old.name) as new:
            await new.hello()
            await new.send(T.RESUME, job=job, after=0)
            check((await new.collect(job))[job], expect("mine", 300))
        await old.submit(prompt="more")
        assert (await old.receive(T.ERROR)).body["code"] == "no_session"


# ------------------------------------------------------------ flow


async def test_without_credit_events_merge_and_nothing_is_lost(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello(credit=2)
        job = await client.submit(prompt="slowly", max_tokens=30)
        await client.receive(T.TOKENS)
        await client.receive(T.TOKENS)
        await _until_state(client, job, "done")
        await client.send(T.CREDIT, total=3)
        message = await client.receive(T.TOKENS, T.DONE)
        assert message.type is T.TOKENS
        ((_, _, seq, ids, text),) = message.body["events"]
        expected = expect("slowly", 30)
        assert ids == expected[seq - 1 :]
        assert text == letters_of(ids)
        assert (await client.receive(T.DONE)).body["reason"] == "length"


async def test_a_client_that_reads_nothing_pauses_its_own_job_only(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as slow, RawClient(worker.endpoint) as fast:
        await slow.hello(credit=0)
        await fast.hello()
        job = await slow.submit(prompt="unread", max_tokens=1000)
        seqs = []
        async with asyncio.timeout(20):
            while len(seqs) < 3 or len(set(seqs[-3:])) > 1 or seqs[-1] == 0:
                check(await fast.run(prompt="fast", max_tokens=20), expect("fast", 20))
                seqs.append((await _stats(slow, job))["seq"])
        assert 32 <= seqs[-1] < 200  # it stopped soon after half of the log was full
        await slow.send(T.CREDIT, total=1_000)
        check((await slow.collect(job))[job], expect("unread", 1000))


async def test_a_deadline_ends_a_running_job_with_what_it_has(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        reply = await client.run(prompt="deadline", max_tokens=2000, deadline_ms=150)
        assert reply.body["reason"] == "deadline"
        assert 0 < len(reply.ids) < 2000
        assert reply.ids == expect("deadline", len(reply.ids))


async def test_a_silent_client_is_asked_and_then_its_jobs_are_cancelled(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as watcher:
        await watcher.hello()
        async with RawClient(worker.endpoint) as client:
            await client.hello(credit=0)
            job = await client.submit(prompt="forgotten", max_tokens=2000)
            await client.receive(T.ACCEPTED)
            await client.receive(T.PING)  # and then it is gone without a word
        body = await _until_state(watcher, job, "done")
        assert body["reason"] == "cancelled"


async def test_ping_is_echoed_and_stats_tell_the_load(worker: Worker) -> None:
    async with RawClient(worker.endpoint) as client:
        await client.hello()
        await client.send(T.PING, t=12345)
        assert (await client.receive(T.PONG)).body == {"t": 12345}
        body = await _stats(client)
        assert body["ready"] is True
        assert body["clients"] >= 1
        await client.send(T.STATS, job="nobody")
        assert (await client.receive(T.ERROR)).body["code"] == "not_found"


async def _stats(client: RawClient, job: str | None = None) -> dict[str, Any]:
    await client.send(T.STATS, **({"job": job} if job else {}))
    return (await client.receive(T.STATS)).body


async def _until_state(client: RawClient, job: str, state: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (body := await _stats(client, job))["state"] != state:
            await asyncio.sleep(0.02)
    return body


# ------------------------------------------------------------ workers of their own


async def test_the_queue_bound_is_a_typed_refusal_with_a_time_to_retry(tmp_path: Path) -> None:
    fake = FakeModel(vocab_size=VOCAB, step_ms=20.0)
    limits = QueueConfig(max_queued=3)
    worker = make_worker(tmp_path, fake=fake, limits=limits, max_num_seqs=1)
    async with running(worker), RawClient(worker.endpoint) as client:
        await client.hello()
        jobs = [await client.submit(prompt=f"q{i}", max_tokens=3) for i in range(12)]
        replies = await client.collect(*jobs)
        refused = [r for r in replies.values() if r.end is not None and r.end.type is T.REJECTED]
        assert {(r.body["code"], r.body["retry"]) for r in refused} == {("busy", True)}
        assert all(r.body["retry_ms"] > 0 for r in refused)
        for i, job in enumerate(jobs):
            if replies[job] not in refused:
                check(replies[job], expect(f"q{i}", 3))
        assert 1 <= len(refused) <= 9


async def test_raw_bytes_on_the_port_do_no_harm(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    assert worker.config.zmq is not None
    zmq_config = replace(worker.config.zmq, endpoint="tcp://127.0.0.1:0")
    worker.config = replace(worker.config, zmq=zmq_config)
    async with running(worker):
        port = int(worker.endpoint.rpartition(":")[2])
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 40, b"\xff" * 5):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(data)
        async with RawClient(worker.endpoint) as client:
            await client.hello()
            check(await client.run(prompt="ok", max_tokens=3), expect("ok", 3))
