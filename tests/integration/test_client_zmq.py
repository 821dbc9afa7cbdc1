"""The ZeroMQ client against a scripted ROUTER: holes, repeats, restarts, silence."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest

from tests.integration.fake_worker import Cuttable, FakeWorker
from tokenbus import AsyncClient, Timeouts, TokenbusError, zmq_job
from tokenbus.bodies import error_to_body
from tokenbus.errors import (
    BusUnavailable,
    Busy,
    Conflict,
    EngineLost,
    Gone,
    InvalidField,
    NoSession,
    ProtocolError,
    TooLarge,
    UnknownJob,
    Unsupported,
    VersionMismatch,
)
from tokenbus.events import JobStatus
from tokenbus.protocol import MessageType as T

FAST = Timeouts(connect_s=5.0, answer_s=5.0, give_up_s=1.0)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with FakeWorker() as fake:
        yield fake


@pytest.fixture
async def client(worker: FakeWorker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(zmq=worker.endpoint, timeouts=FAST) as the_client:
        yield the_client


async def collect(client: AsyncClient, job: str = "j", **options: int) -> str:
    return await client.generate("p", job=job, **options).text()  # type: ignore[arg-type]


async def taken(
    worker: FakeWorker, client: AsyncClient, *, seed: int = 7, **options: int
) -> asyncio.Task[str]:
    """The job `j`, which the worker has accepted; the task reads its text."""
    reading = asyncio.create_task(collect(client, **options))
    await worker.expect(T.SUBMIT)
    await worker.accept("j", seed=seed)
    return reading


async def begun(worker: FakeWorker, client: AsyncClient, **options: int) -> asyncio.Task[str]:
    """The same, and its first token is on its way."""
    reading = await taken(worker, client, **options)
    await worker.tokens(("j", 1, [5], "a"))
    return reading


@contextlib.asynccontextmanager
async def orphaned() -> AsyncIterator[tuple[FakeWorker, asyncio.Task[str]]]:
    """A job of which the client holds two tokens, and the worker that died with it."""
    timeouts = Timeouts(give_up_s=30)
    async with (
        FakeWorker(heartbeat_ms=400) as worker,
        AsyncClient(zmq=worker.endpoint, timeouts=timeouts) as client,
    ):
        reading = await taken(worker, client, seed=123, max_tokens=8)
        await worker.tokens(("j", 1, [5, 6], "ab"))
        await worker.settle()
        worker.kill()
        yield worker, reading


async def finish(worker: FakeWorker) -> None:
    """Take the orphaned job and give it its last token."""
    await worker.accept("j", seed=123, seq=2)
    await worker.tokens(("j", 3, [7], "c"))
    await worker.done("j", [5, 6, 7])


async def test_tokens_come_in_order_and_done_has_the_rest(
    worker: FakeWorker, client: AsyncClient
) -> None:
    stream = client.generate("p", job="j", max_tokens=3)
    reading = asyncio.create_task(stream.text())
    submit = await worker.expect(T.SUBMIT)
    assert submit.body == {"job": "j", "prompt": "p", "max_tokens": 3}
    await worker.accept("j", seed=9)
    await worker.tokens(("j", 1, [5], "a"))
    await worker.tokens(("j", 2, [6, 7], "b"))
    await worker.done("j", [5, 6, 7], text="!")
    assert await reading == "ab!"
    assert stream.done is not None
    assert stream.started is not None
    assert (stream.started.seed, stream.started.worker) == (9, "fake")
    assert (stream.done.usage.completion_tokens, stream.done.reason) == (3, "stop")


async def test_a_hole_is_filled_by_resume_and_a_repeat_is_dropped(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await begun(worker, client)
    await worker.tokens(("j", 1, [5], "a"))
    await worker.tokens(("j", 3, [7], "c"))
    resume = await worker.expect(T.RESUME)
    assert resume.body == {"job": "j", "after": 1}
    await worker.tokens(("j", 2, [6], "b"), ("j", 3, [7], "c"))
    await worker.done("j", [5, 6, 7])
    assert await reading == "abc"


async def test_done_before_its_tokens_asks_for_them(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await taken(worker, client)
    await worker.done("j", [5, 6])
    resume = await worker.expect(T.RESUME)
    assert resume.body["after"] == 0
    await worker.tokens(("j", 1, [5, 6], "ab"))
    await worker.done("j", [5, 6])
    assert await reading == "ab"


async def test_a_wrong_crc_is_a_protocol_error_after_the_tokens(
    worker: FakeWorker, client: AsyncClient
) -> None:
    stream = client.generate("p", job="j")
    reading = asyncio.create_task(anext(stream))
    await worker.expect(T.SUBMIT)
    await worker.accept("j")
    await worker.tokens(("j", 1, [5], "a"))
    await worker.done("j", [5], crc=1)
    assert (await reading).text == "a"
    with pytest.raises(ProtocolError) as caught:
        await anext(stream)
    assert caught.value.field == "crc"


async def test_many_jobs_share_one_connection(worker: FakeWorker, client: AsyncClient) -> None:
    names = [f"j{i}" for i in range(50)]
    readings = [asyncio.create_task(collect(client, name)) for name in names]
    for _ in names:
        await worker.expect(T.SUBMIT)
    for name in names:
        await worker.accept(name)
    for seq in (1, 2):
        await worker.tokens(*[(name, seq, [seq], f"{name}.{seq} ") for name in names])
    for name in names:
        await worker.done(name, [1, 2])
    texts = await asyncio.gather(*readings)
    assert [f"{name}.1 {name}.2 " for name in names] == texts
    assert len(worker.hellos) == 1


async def test_a_refused_job_raises_its_typed_error(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = asyncio.create_task(collect(client))
    await worker.expect(T.SUBMIT)
    body = {"job": "j", "code": "busy", "retry": True, "retry_ms": 250, "message": "full"}
    await worker.send(T.REJECTED, body)
    with pytest.raises(Busy) as caught:
        await reading
    assert (caught.value.retry, caught.value.retry_ms) == (True, 250)


async def test_an_error_ends_the_stream_with_its_class(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await taken(worker, client)
    await worker.error(EngineLost("gone", retry_ms=1), job="j", attempt=1, seq=0)
    with pytest.raises(EngineLost):
        await reading


async def test_a_restarted_worker_goes_on_from_the_tokens_the_client_holds() -> None:
    async with (
        orphaned() as (first, reading),
        FakeWorker(boot="boot-2", port=first.port) as second,
    ):
        submit = await second.expect(T.SUBMIT)
        assert submit.body == {
            "job": "j",
            "prompt": "p",
            "max_tokens": 8,
            "seed": 123,
            "have": [5, 6],
        }
        await finish(second)
        assert await reading == "abc"
    assert first.hellos[0].body["client"] == second.hellos[0].body["client"]


async def test_a_hello_that_died_with_its_worker_is_said_to_the_next_one() -> None:
    """The second worker dies between HELLO and WELCOME; ZeroMQ itself reconnects to the third."""
    async with orphaned() as (first, reading):
        async with FakeWorker(boot="boot-2", port=first.port) as second:
            second.greets = False
            await second.expect(T.HELLO)
        async with asyncio.timeout(10), FakeWorker(boot="boot-3", port=first.port) as third:
            await third.expect(T.SUBMIT)
            await finish(third)
            assert await reading == "abc"


async def test_a_new_connection_to_the_same_worker_resumes(
    worker: FakeWorker, client: AsyncClient
) -> None:
    """ZeroMQ reconnected by itself: the worker does not know the peer and says so."""
    reading = await begun(worker, client)
    await worker.error(NoSession("who are you?"))
    resume = await worker.expect(T.RESUME)
    assert resume.body == {"job": "j", "after": 1}
    assert len(worker.hellos) == 2
    await worker.tokens(("j", 2, [6], "b"))
    await worker.done("j", [5, 6])
    assert await reading == "ab"


async def test_a_cut_connection_resumes_at_once_and_not_at_the_next_heartbeat() -> None:
    async with (
        asyncio.timeout(10),
        FakeWorker(heartbeat_ms=60_000) as worker,
        Cuttable(worker.port) as way,
        AsyncClient(zmq=way.endpoint, timeouts=FAST) as client,
    ):
        reading = await begun(worker, client)
        await worker.settle()
        for after, (token_id, text) in enumerate([(6, "b"), (7, "c")], start=1):
            way.cut()
            resume = await worker.expect(T.RESUME)
            assert resume.body == {"job": "j", "after": after}
            assert len(worker.hellos) == 1 + after  # one for each connection
            await worker.tokens(("j", after + 1, [token_id], text))
            await worker.settle()
        await worker.done("j", [5, 6, 7])
        assert await reading == "abc"


async def test_a_submit_that_a_restarted_worker_never_read_is_sent_again() -> None:
    """The connection to the new worker broke before it read the SUBMIT."""
    async with (
        orphaned() as (first, reading),
        FakeWorker(boot="boot-2", port=first.port) as second,
    ):
        lost = await second.expect(T.SUBMIT)
        await second.error(NoSession("who are you?"))
        assert (await second.expect(T.SUBMIT)).body == lost.body
        await finish(second)
        assert await reading == "abc"


async def test_a_job_that_the_worker_forgot_is_submitted_again_from_the_tokens_here(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await begun(worker, client)
    for _ in range(2):  # once after each WELCOME
        await worker.error(NoSession("who are you?"))
        await worker.expect(T.RESUME)
        await worker.error(UnknownJob("never heard of it"), job="j")
        submit = await worker.expect(T.SUBMIT)
        assert (submit.body["seed"], submit.body["have"]) == (7, [5])
        await worker.accept("j", seq=1)
    await worker.tokens(("j", 3, [7], "c"))
    await worker.expect(T.RESUME)
    await worker.error(UnknownJob("never heard of it"), job="j")
    with pytest.raises(UnknownJob):
        await reading


async def test_a_durable_job_that_redis_lost_is_not_submitted_again(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await begun(worker, client, durable=True)
    await worker.error(NoSession("who are you?"))
    await worker.expect(T.RESUME)
    await worker.error(UnknownJob("never heard of it"), job="j")
    with pytest.raises(UnknownJob):
        await reading


async def test_a_forgotten_job_that_is_being_cancelled_is_not_submitted_again(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await begun(worker, client)
    cancelling = asyncio.create_task(client.cancel("j"))
    await worker.expect(T.CANCEL)
    await worker.error(NoSession("who are you?"))
    await worker.expect(T.CANCEL)
    for _ in range(2):
        await worker.error(UnknownJob("never heard of it"), job="j")
    for task in (reading, cancelling):
        with pytest.raises(UnknownJob):
            await task
    await worker.settle()
    assert worker.heard.count(T.SUBMIT) == 1


async def test_a_question_asked_before_the_job_was_submitted_does_not_end_it(
    worker: FakeWorker, client: AsyncClient
) -> None:
    asking = asyncio.create_task(client.status("j"))
    await worker.expect(T.STATS)
    reading = asyncio.create_task(collect(client))
    await worker.expect(T.SUBMIT)
    await worker.error(UnknownJob("never heard of it"), job="j")
    with pytest.raises(UnknownJob):
        await asking
    await worker.accept("j")
    await worker.done("j", [])
    assert await reading == ""


async def test_a_durable_job_that_no_worker_took_ends_for_those_who_resume_it(
    worker: FakeWorker, client: AsyncClient
) -> None:
    rejected = {"job": "j", **error_to_body(InvalidField("top_p", field="top_p"))}
    tailing = asyncio.create_task(client.tail("j").text())
    await worker.expect(T.RESUME)
    reading = asyncio.create_task(collect(client, durable=True))
    await worker.expect(T.SUBMIT)
    await worker.send(T.REJECTED, rejected)
    for task in (tailing, reading):
        with pytest.raises(InvalidField):
            await task
    reading = await taken(worker, client, durable=True)
    await worker.error(NoSession("who are you?"))
    await worker.expect(T.RESUME)
    await worker.send(T.REJECTED, rejected)
    with pytest.raises(InvalidField):
        await reading


@pytest.mark.parametrize("is_running", [True, False], ids=["which runs", "just sent"])
async def test_a_conflict_with_a_job_is_no_end_of_it(
    is_running: bool, worker: FakeWorker, client: AsyncClient
) -> None:
    first = asyncio.create_task(collect(client))
    await worker.expect(T.SUBMIT)
    if is_running:
        await worker.accept("j")
        await worker.settle()
    second = asyncio.create_task(client.generate("other", job="j").text())
    await worker.expect(T.SUBMIT)
    conflict = Conflict("job 'j' is another request", field="job")
    await worker.send(T.REJECTED, error_to_body(conflict, job="j"))
    with pytest.raises(Conflict):
        await second
    if not is_running:
        await worker.accept("j")
    await worker.tokens(("j", 1, [5], "a"))
    await worker.done("j", [5])
    assert await first == "a"


@pytest.mark.parametrize("retry_ms", [20, None], ids=["when it says", "after a while"])
async def test_a_worker_too_busy_to_resume_a_job_is_asked_again(
    retry_ms: int | None, worker: FakeWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable job after a restart of its broker, which has not found its Redis yet."""
    monkeypatch.setattr(zmq_job, "RESUME_AGAIN_S", 3_600.0 if retry_ms else 0.02)
    reading = await begun(worker, client, durable=True)
    await worker.error(NoSession("who are you?"))
    await worker.expect(T.RESUME)
    for _ in range(7):  # more often than a hole is asked for
        await worker.error(Busy("Redis cannot be reached now", retry_ms=retry_ms), job="j")
        assert (await worker.expect(T.RESUME)).body == {"job": "j", "after": 1}
    await worker.tokens(("j", 2, [6], "b"))
    await worker.done("j", [5, 6])
    assert await reading == "ab"


async def test_a_submit_that_was_never_answered_is_sent_again(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = asyncio.create_task(collect(client))
    first = await worker.expect(T.SUBMIT)
    await worker.error(NoSession("who are you?"))
    assert first.body == (await worker.expect(T.SUBMIT)).body
    await worker.accept("j")
    await worker.done("j", [])
    assert await reading == ""


async def test_a_silent_worker_is_left_after_three_heartbeats_and_found_again(
    worker: FakeWorker, client: AsyncClient
) -> None:
    worker.heartbeat_ms = 200
    reading = await begun(worker, client)
    while len(worker.hellos) < 2:  # pings go unanswered until the client says HELLO anew
        message = await worker.receive()
        if message.type is T.HELLO:
            worker.hellos.append(message)
    await worker.welcome()
    await worker.expect(T.RESUME)
    await worker.done("j", [5])
    assert await reading == "a"


async def test_a_slow_worker_is_waited_for() -> None:
    """The client comes first; the worker binds later."""
    async with FakeWorker() as probe:
        port = probe.port
    async with AsyncClient(zmq=f"tcp://127.0.0.1:{port}", timeouts=FAST) as client:
        reading = asyncio.create_task(collect(client))
        await asyncio.sleep(0)
        async with FakeWorker(port=port) as worker:
            await worker.expect(T.SUBMIT)
            await worker.accept("j")
            await worker.tokens(("j", 1, [5], "a"))
            await worker.done("j", [5])
            assert await reading == "a"


async def test_no_worker_at_all_is_an_error_in_time() -> None:
    async with FakeWorker() as probe:
        port = probe.port
    timeouts = Timeouts(connect_s=0.2)
    async with AsyncClient(zmq=f"tcp://127.0.0.1:{port}", timeouts=timeouts) as client:
        with pytest.raises(BusUnavailable):
            await collect(client)
        with pytest.raises(BusUnavailable):
            await client.status("j")


async def test_a_worker_that_stays_away_ends_the_job_with_a_retryable_error() -> None:
    async with FakeWorker(heartbeat_ms=400) as worker:
        timeouts = Timeouts(connect_s=0.3, give_up_s=0.3)
        async with AsyncClient(zmq=worker.endpoint, timeouts=timeouts) as client:
            reading = await taken(worker, client)
            worker.kill()
            with pytest.raises(BusUnavailable) as caught:
                await reading
            assert caught.value.retry


async def test_a_worker_of_another_major_version_is_an_error(
    worker: FakeWorker, client: AsyncClient
) -> None:
    worker.greets = False
    reading = asyncio.create_task(collect(client))
    await worker.expect(T.HELLO)
    await worker.error(VersionMismatch("speaks [2]"))
    with pytest.raises(VersionMismatch):
        await reading


async def test_leaving_the_loop_early_cancels_the_job(
    worker: FakeWorker, client: AsyncClient
) -> None:
    async def read_one() -> None:
        async for _ in client.generate("p", job="j"):
            break

    reading = asyncio.create_task(read_one())
    await worker.expect(T.SUBMIT)
    await worker.accept("j")
    await worker.tokens(("j", 1, [5], "a"))
    await reading
    gc.collect()
    assert (await worker.expect(T.CANCEL)).body == {"job": "j"}


async def test_cancel_waits_for_the_end_and_the_stream_sees_it(
    worker: FakeWorker, client: AsyncClient
) -> None:
    stream = client.generate("p", job="j")
    reading = asyncio.create_task(stream.text())
    await worker.expect(T.SUBMIT)
    await worker.accept("j")
    cancelling = asyncio.create_task(client.cancel("j"))
    await worker.expect(T.CANCEL)
    await worker.done("j", [], reason="cancelled")
    await cancelling
    assert await reading == ""
    assert stream.done is not None
    assert stream.done.reason == "cancelled"


async def test_a_cancel_whose_answer_was_lost_is_sent_again(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await taken(worker, client)
    cancelling = asyncio.create_task(client.cancel("j"))
    await worker.expect(T.CANCEL)
    await worker.error(NoSession("who are you?"))
    assert (await worker.expect(T.CANCEL)).body == {"job": "j"}
    await worker.done("j", [], reason="cancelled")
    await cancelling
    assert await reading == ""


async def test_a_job_left_without_a_connection_is_cancelled_on_the_next(
    worker: FakeWorker, client: AsyncClient
) -> None:
    stream = client.generate("p", job="j")
    reading = asyncio.create_task(anext(stream))
    await worker.expect(T.SUBMIT)
    await worker.accept("j")
    await worker.tokens(("j", 1, [5], "a"))
    await reading
    worker.greets = False
    await worker.error(NoSession("who are you?"))
    await worker.expect(T.HELLO)
    await stream.aclose()
    await worker.welcome()
    assert (await worker.expect(T.CANCEL)).body == {"job": "j"}


async def test_cancel_and_status_of_an_unknown_job_raise(
    worker: FakeWorker, client: AsyncClient
) -> None:
    for call, kind in ((client.cancel, T.CANCEL), (client.status, T.STATS)):
        asking = asyncio.create_task(call("j"))  # type: ignore[arg-type]
        await worker.expect(kind)
        await worker.error(UnknownJob("never heard of it"), job="j")
        with pytest.raises(UnknownJob):
            await asking


@pytest.mark.parametrize("kind", [T.CANCEL, T.STATS], ids=["cancel", "status"])
async def test_a_worker_too_busy_for_a_question_refuses_it_and_the_job_goes_on(
    kind: T, worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await begun(worker, client, durable=True)
    call = client.cancel if kind is T.CANCEL else client.status
    asking = asyncio.create_task(call("j"))  # type: ignore[arg-type]
    await worker.expect(kind)
    await worker.error(Busy("Redis cannot be reached now", retry_ms=500), job="j")
    with pytest.raises(Busy) as caught:
        await asking
    assert caught.value.retry_ms == 500
    await worker.tokens(("j", 2, [6], "b"))
    await worker.done("j", [5, 6])
    assert await reading == "ab"


async def test_a_refused_resume_is_no_answer_to_a_cancel(
    worker: FakeWorker, client: AsyncClient
) -> None:
    tailing = asyncio.create_task(client.tail("j", from_seq=99).text())
    await worker.expect(T.RESUME)
    cancelling = asyncio.create_task(client.cancel("j"))
    await worker.expect(T.CANCEL)
    await worker.error(Gone("not yet"), job="j")
    with pytest.raises(Gone):
        await tailing
    assert not cancelling.done()
    await worker.done("j", [], reason="cancelled")
    await cancelling


async def test_a_cancel_that_nobody_waits_for_any_more_is_not_sent_again(
    worker: FakeWorker,
) -> None:
    timeouts = Timeouts(answer_s=0.05)
    async with AsyncClient(zmq=worker.endpoint, timeouts=timeouts) as client:
        reading = await begun(worker, client)
        with pytest.raises(BusUnavailable):
            await client.cancel("j")
        await worker.expect(T.CANCEL)
        await worker.error(NoSession("who are you?"))
        await worker.expect(T.RESUME)
        await worker.settle()
        assert worker.heard.count(T.CANCEL) == 1
        await worker.done("j", [5])
        assert await reading == "a"


async def test_status_says_where_a_job_stands(worker: FakeWorker, client: AsyncClient) -> None:
    asking = asyncio.create_task(client.status("j"))
    assert (await worker.expect(T.STATS)).body == {"job": "j"}
    await worker.send(T.STATS, {"job": "j", "state": "running", "attempt": 1, "seq": 4})
    assert JobStatus("j", "running", 1, 4) == await asking


async def test_submit_returns_when_the_job_was_taken_and_tail_reads_it(
    worker: FakeWorker, client: AsyncClient
) -> None:
    submitting = asyncio.create_task(client.submit("p", job="j"))
    await worker.expect(T.SUBMIT)
    await worker.accept("j")
    assert await submitting == "j"
    await worker.tokens(("j", 1, [5], "a"))
    reading = asyncio.create_task(client.tail("j", from_seq=1).text())
    assert (await worker.expect(T.RESUME)).body == {"job": "j", "after": 1}
    await worker.tokens(("j", 2, [6], "b"))
    await worker.done("j", [5, 6])
    assert await reading == "b"


async def test_a_tail_from_a_position_that_is_gone_raises(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = asyncio.create_task(client.tail("j", from_seq=99).text())
    await worker.expect(T.RESUME)
    await worker.error(Gone("not yet"), job="j")
    with pytest.raises(Gone):
        await reading


async def test_credit_is_renewed_as_events_come(worker: FakeWorker) -> None:
    async with AsyncClient(zmq=worker.endpoint, credit=10) as client:
        reading = asyncio.create_task(collect(client))
        await worker.expect(T.SUBMIT)
        assert worker.hellos[0].body["credit"] == 10
        await worker.accept("j")
        for seq in range(1, 31):
            await worker.tokens(("j", seq, [seq], "x"))
        await worker.done("j", list(range(1, 31)))
        assert await reading == "x" * 30
        while len(worker.credits) < 4:
            await worker.expect(T.CREDIT)
    assert sorted(worker.credits) == worker.credits
    assert 30 <= worker.credits[-1] <= 40


async def test_a_credit_of_one_event_is_renewed_after_every_event(worker: FakeWorker) -> None:
    async with asyncio.timeout(10), AsyncClient(zmq=worker.endpoint, credit=1) as client:
        reading = await begun(worker, client)
        await worker.expect(T.CREDIT)
        await worker.tokens(("j", 2, [6], "b"))
        await worker.expect(T.CREDIT)
        await worker.done("j", [5, 6])
        assert await reading == "ab"
    assert worker.credits == [2, 3]


async def test_a_prompt_over_the_limits_is_refused_before_it_is_sent(
    client: AsyncClient, worker: FakeWorker
) -> None:
    greeting = asyncio.create_task(worker.expect(T.PING))
    with pytest.raises(TooLarge):
        await client.generate("p", stop_token_ids=[1] * 500).text()
    with pytest.raises(InvalidField) as caught:
        client.generate("p", temperature=float("nan"))
    assert caught.value.field == "temperature"
    messages = [{"role": "user", "content": "x" * 500_000}] * 2
    with pytest.raises(TooLarge):
        await client.generate(messages=[*messages, *messages]).text()
    greeting.cancel()


async def test_garbage_from_a_worker_ends_the_session_not_the_client(
    worker: FakeWorker, client: AsyncClient
) -> None:
    reading = await taken(worker, client)
    await worker.send(T.TOKENS, {"events": [["j", 1, 1, "x", "y"]]})
    await worker.expect(T.RESUME)
    assert len(worker.hellos) == 2
    await worker.send_frames([b"TB\x01\x63", b"\x80"])  # a type of a later minor version
    await worker.done("j", [])
    assert await reading == ""


async def test_a_worker_that_never_resends_is_a_protocol_error(
    worker: FakeWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.zmq_job.RESUME_AGAIN_S", 0.0)
    reading = await taken(worker, client)
    for _ in range(6):
        await worker.tokens(("j", 9, [5], "a"))
    with pytest.raises(ProtocolError):
        await reading


async def test_a_worker_that_cannot_continue_is_an_engine_lost() -> None:
    async with (
        orphaned() as (first, reading),
        FakeWorker(boot="boot-2", port=first.port) as second,
    ):
        await second.expect(T.SUBMIT)
        error = {"job": "j", "code": Unsupported.code, "field": "have", "retry": False}
        await second.send(T.REJECTED, error)
        with pytest.raises(EngineLost):
            await reading


async def test_close_ends_open_streams(worker: FakeWorker) -> None:
    client = AsyncClient(zmq=worker.endpoint)
    reading = asyncio.create_task(collect(client))
    await worker.expect(T.SUBMIT)
    await client.close()
    with pytest.raises(BusUnavailable):
        await reading
    with pytest.raises(TokenbusError):
        await client.submit("p")
