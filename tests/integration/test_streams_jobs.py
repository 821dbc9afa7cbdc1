"""Jobs through the Redis door on real servers: the plain way, bad input, duplicates, cancel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import msgpack
import pytest

from broker.streams.address import parse_redis_url
from broker.streams.admin import queue_status
from broker.streams.lane import Lane
from broker.streams.scripts import SOURCES
from ops import dead_letters
from tests.redis_servers import RedisServer
from tests.streams_kit import Bus, open_bus, text_of, until
from tokenbus.errors import Busy, EngineLost, Poisoned, TooLong
from tokenbus.keys import GROUP


@pytest.fixture
async def bus(shared_redis: RedisServer) -> AsyncIterator[Bus]:
    async with open_bus(shared_redis) as bus:
        yield bus


async def test_a_plain_xadd_becomes_started_tokens_done(bus: Bus) -> None:
    worker = await bus.worker()
    worker.ledger.is_automatic = True
    job = bus.submit(max_tokens=20)
    done = await until(lambda: bus.terminal(job))
    entries = bus.out(job)
    assert entries[0][0] == "1-0"
    assert entries[0][1]["event"] == "started"
    assert entries[0][1]["prompt_tokens"] == "5"
    assert entries[-1][0] == "1-21"
    assert done["reason"] == "length"
    assert bus.text(job) == text_of(20)
    bus.audit(job)
    bus.audit_queue()
    assert bus.state(job)["state"] == "done"


async def test_the_first_token_goes_out_at_once_and_later_ones_share_entries(bus: Bus) -> None:
    worker = await bus.worker(coalesce_ms=10_000, coalesce_tokens=4)
    job = bus.submit(max_tokens=20)
    await until(lambda: job in worker.ledger.runs)
    worker.ledger.step(job)
    await until(lambda: bus.events(job) == ["started", "tokens"])
    worker.ledger.step(job, 3)
    worker.ledger.step(job)
    await until(lambda: [entry for entry, _ in bus.out(job)] == ["1-0", "1-1", "1-5"])
    worker.ledger.step(job)
    worker.ledger.finish(job)  # the sixth token goes out with the end
    await until(lambda: bus.terminal(job))
    assert [entry for entry, _ in bus.out(job)] == ["1-0", "1-1", "1-5", "1-6", "1-7"]
    bus.audit(job)


async def test_only_as_many_entries_are_read_as_there_are_free_slots(bus: Bus) -> None:
    jobs = [bus.submit() for _ in range(5)]
    worker = await bus.worker(max_jobs=2)
    await until(lambda: len(worker.ledger.runs) == 2)
    assert bus.num_pending() == 2
    worker.ledger.finish(jobs[0])
    await until(lambda: jobs[2] in worker.ledger.runs)
    assert bus.num_pending() == 2
    assert bus.num_entries() == 4  # queued and running, no more


async def test_high_goes_first_and_low_keeps_a_share(bus: Bus) -> None:
    for i in range(30):
        bus.submit(job=f"n{i}")
    for i in range(10):
        bus.submit(bus.keys.jobs("high"), job=f"h{i}")
        bus.submit(bus.keys.jobs("low"), job=f"l{i}")
    worker = await bus.worker(max_jobs=1)
    order: list[str] = []
    while len(order) < 30:
        await until(lambda: worker.ledger.runs)
        order.extend(worker.ledger.runs)
        worker.ledger.finish(order[-1])
    lows = [name for name in order if name.startswith("l")]
    rest = [name for name in order if not name.startswith("l")]
    assert rest == [f"h{i}" for i in range(10)] + [f"n{i}" for i in range(len(rest) - 10)]
    assert len(lows) == 3, order  # a tenth
    priorities = {
        s.prepared.request.job[0]: s.prepared.request.priority for s in worker.ledger.submits
    }
    assert priorities == {"h": "high", "n": "normal", "l": "low"}


BAD_ENTRIES = {
    "no prompt": ({"max_tokens": "4"}, "invalid", "prompt"),
    "empty prompt": ({"prompt": ""}, "invalid", "prompt"),
    "two prompts": ({"prompt": "a", "input_ids": "[1]"}, "invalid", "input_ids"),
    "prompt not UTF-8": ({"prompt": b"\xff\xfe"}, "invalid", "prompt"),
    "messages no JSON": ({"messages": "[{"}, "invalid", "messages"),
    "messages no array": ({"messages": '{"role":"user"}'}, "invalid", "messages"),
    "role unknown": (
        {"messages": '[{"role":"robot","content":"a"}]'},
        "invalid",
        "messages[0].role",
    ),
    "ids negative": ({"input_ids": "[1,-2]"}, "invalid", "input_ids[1]"),
    "ids of strings": ({"input_ids": '["1"]'}, "invalid", "input_ids[0]"),
    "max_tokens zero": ({"prompt": "a", "max_tokens": "0"}, "invalid", "max_tokens"),
    "max_tokens words": ({"prompt": "a", "max_tokens": "many"}, "invalid", "max_tokens"),
    "temperature NaN": ({"prompt": "a", "temperature": "nan"}, "invalid", "temperature"),
    "temperature low": ({"prompt": "a", "temperature": "-1"}, "invalid", "temperature"),
    "top_p high": ({"prompt": "a", "top_p": "1.5"}, "invalid", "top_p"),
    "seed negative": ({"prompt": "a", "seed": "-1"}, "invalid", "seed"),
    "stop no JSON": ({"prompt": "a", "stop": "["}, "invalid", "stop"),
    "ignore_eos word": ({"prompt": "a", "ignore_eos": "maybe"}, "invalid", "ignore_eos"),
    "deadline zero": ({"prompt": "a", "deadline_ms": "0"}, "invalid", "deadline_ms"),
    "body no msgpack": ({"body": b"\xc1"}, "bad_frame", ""),
    "body and prompt": ({"body": b"\x80", "prompt": "a"}, "invalid", "prompt"),
    "job id bad": ({"prompt": "a", "job": "a b"}, "invalid", "job"),
    "option unknown to us": ({"prompt": "a", "logprobs": "5"}, "unsupported", "logprobs"),
    "refused by the model": ({"prompt": "bad"}, "invalid", "prompt"),
}


async def test_bad_input_is_answered_with_its_field_and_disturbs_nothing(bus: Bus) -> None:
    good = bus.submit(max_tokens=30)
    entries = {name: bus.client.xadd(bus.keys.jobs(), row[0]) for name, row in BAD_ENTRIES.items()}
    also_good = bus.submit(max_tokens=30)
    worker = await bus.worker()
    worker.ledger.is_automatic = True
    await until(lambda: bus.terminal(good) and bus.terminal(also_good))
    for name, (_, code, field) in BAD_ENTRIES.items():
        error = await until(lambda name=name: bus.terminal(entries[name]), what=name)
        assert (error["event"], error["code"]) == ("error", code), (name, error)
        assert error.get("field", "").startswith(field), (name, error)
        assert error["retry"] == "false"
        assert len(bus.out(entries[name])) == 1
    bus.audit(good)
    bus.audit(also_good)
    bus.audit_queue()
    assert len(worker.ledger.submits) == 2


async def test_the_error_of_a_bad_body_goes_to_the_job_it_names(bus: Bus) -> None:
    await bus.worker()
    bus.client.xadd(bus.keys.jobs(), {"body": b"\x82\xa3job\xa3abc\xaamax_tokens\x00"})
    error = await until(lambda: bus.terminal("abc"))
    assert error["field"] == "max_tokens"


async def test_a_repeated_job_runs_once(bus: Bus) -> None:
    for _ in range(3):
        bus.submit(job="same", max_tokens=5)
    worker = await bus.worker()
    await until(lambda: bus.num_entries() == 1)
    bus.submit(job="same", max_tokens=5)
    await until(lambda: worker.door.counters.duplicates == 3)
    worker.ledger.is_automatic = True
    await until(lambda: bus.terminal("same"))
    bus.submit(job="same", max_tokens=5)
    await until(lambda: bus.num_entries() == 0)
    assert len(worker.ledger.submits) == 1
    bus.audit("same")
    bus.audit_queue()
    assert bus.client.xlen(bus.keys.dead) == 0


async def test_another_request_under_a_taken_job_id_goes_to_the_dead_stream(bus: Bus) -> None:
    worker = await bus.worker()
    bus.submit(job="x", prompt="one")
    await until(lambda: "x" in worker.ledger.runs)
    bus.submit(job="x", prompt="two")
    await until(lambda: bus.client.xlen(bus.keys.dead) == 1)
    _, dead = bus.client.xrange(bus.keys.dead)[0]
    assert (dead["code"], dead["job"], dead["request.prompt"]) == ("conflict", "x", "two")
    worker.ledger.finish("x")
    await until(lambda: bus.terminal("x"))
    assert bus.num_entries() == 0


async def test_an_idempotency_key_names_the_job_that_has_it(bus: Bus) -> None:
    worker = await bus.worker()
    first = bus.submit(idempotency_key="order-1")
    await until(lambda: first in worker.ledger.runs)
    second = bus.submit(idempotency_key="order-1")
    other_tenant = bus.submit(idempotency_key="order-1", tenant="b")
    error = await until(lambda: bus.terminal(second))
    assert (error["code"], error["job"]) == ("conflict", first)
    await until(lambda: other_tenant in worker.ledger.runs)
    worker.ledger.finish(other_tenant)
    worker.ledger.finish(first)
    await until(lambda: bus.num_entries() == 0)
    third = bus.submit(idempotency_key="order-1")
    error = await until(lambda: bus.terminal(third))
    assert error["job"] == first
    bus.audit_queue()


async def test_an_idempotency_key_outlives_the_reply_of_its_job(bus: Bus) -> None:
    worker = await bus.worker()
    worker.ledger.is_automatic = True
    first = bus.submit(idempotency_key="order-1")
    await until(lambda: bus.terminal(first))
    bus.client.delete(bus.keys.job(first), bus.keys.out(first))  # as they are in an hour
    second = bus.submit(idempotency_key="order-1")
    error = await until(lambda: bus.terminal(second))
    assert (error.get("code"), error.get("job")) == ("conflict", first)
    assert len(worker.ledger.submits) == 1


async def test_a_colon_in_tenant_or_idempotency_key_does_not_join_two_keys(bus: Bus) -> None:
    worker = await bus.worker()
    first = bus.submit(tenant="a:b", idempotency_key="c")
    second = bus.submit(tenant="a", idempotency_key="b:c")
    await until(lambda: len(worker.ledger.runs) == 2)
    assert set(worker.ledger.runs) == {first, second}


async def test_a_job_that_failed_for_now_frees_its_idempotency_key(bus: Bus) -> None:
    worker = await bus.worker()
    first = bus.submit(idempotency_key="k")
    await until(lambda: first in worker.ledger.runs)
    worker.ledger.fail(first, EngineLost("gone"))
    error = await until(lambda: bus.terminal(first))
    assert (error["code"], error["retry"]) == ("engine_lost", "true")
    second = bus.submit(idempotency_key="k")
    await until(lambda: second in worker.ledger.runs)


def cancel(bus: Bus, job: str) -> None:
    bus.client.set(bus.keys.cancel(job), 1, ex=86_400)
    bus.client.xadd(bus.keys.control, {"op": "cancel", "job": job})


async def test_cancel_before_pickup_runs_no_step(bus: Bus) -> None:
    job = bus.submit()
    cancel(bus, job)
    worker = await bus.worker()
    done = await until(lambda: bus.terminal(job))
    assert done["reason"] == "cancelled"
    assert worker.ledger.submits == []
    bus.audit(job)
    bus.audit_queue()


async def test_cancel_of_a_running_job_keeps_its_tokens(bus: Bus) -> None:
    worker = await bus.worker()
    job = bus.submit()
    await until(lambda: job in worker.ledger.runs)
    worker.ledger.step(job, 3)
    cancel(bus, job)
    cancel(bus, job)
    cancel(bus, "unknown")
    done = await until(lambda: bus.terminal(job))
    assert done["reason"] == "cancelled"
    assert bus.text(job) == text_of(3)
    cancel(bus, job)  # after the end: no effect
    another = bus.submit()
    await until(lambda: another in worker.ledger.runs)
    bus.audit(job)


async def test_a_cancel_after_the_end_does_not_reach_a_later_job_of_that_id(bus: Bus) -> None:
    worker = await bus.worker()
    bus.submit(job="again")
    await until(lambda: "again" in worker.ledger.runs)
    worker.ledger.finish("again")
    await until(lambda: bus.terminal("again"))
    cancel(bus, "again")
    await until(lambda: not bus.client.exists(bus.keys.cancel("again")), timeout_s=3)
    bus.client.delete(bus.keys.job("again"), bus.keys.out("again"))  # as they are in an hour
    bus.submit(job="again")
    await until(lambda: "again" in worker.ledger.runs)


async def test_a_rejected_job_takes_its_cancel_mark_along(bus: Bus) -> None:
    bus.submit(job="bad", temperature="hot")
    cancel(bus, "bad")
    await bus.worker()
    await until(lambda: bus.terminal("bad"))
    assert not bus.client.exists(bus.keys.cancel("bad"))


async def test_a_deadline_that_passed_in_the_queue_runs_no_step(bus: Bus) -> None:
    job = bus.submit(deadline_ms=30)
    later = bus.submit(deadline_ms=60_000)
    await asyncio.sleep(0.05)
    worker = await bus.worker()
    done = await until(lambda: bus.terminal(job))
    assert done["reason"] == "deadline"
    await until(lambda: later in worker.ledger.runs)
    left_s = (worker.ledger.submits[0].deadline_ns - time.monotonic_ns()) / 1e9
    assert 50 < left_s < 60
    bus.audit(job)


async def test_a_seed_is_fixed_by_the_request_or_drawn_once(bus: Bus) -> None:
    worker = await bus.worker()
    given, drawn = bus.submit(seed=7), bus.submit()
    await until(lambda: len(worker.ledger.runs) == 2)
    seeds = {s.prepared.request.job: s.seed for s in worker.ledger.submits}
    assert seeds[given] == 7
    assert 0 <= seeds[drawn] < 2**53
    assert bus.out(drawn)[0][1]["seed"] == str(seeds[drawn]) == bus.state(drawn)["seed"]


async def test_a_refused_job_is_given_back_or_ended(bus: Bus) -> None:
    worker = await bus.worker()
    worker.ledger.refuse_with = TooLong("prompt: too long", field="prompt")
    job = bus.submit()
    error = await until(lambda: bus.terminal(job))
    assert (error["code"], error["field"]) == ("too_long", "prompt")
    worker.ledger.refuse_with = Busy("full")
    job = bus.submit()
    await until(lambda: worker.door.counters.released == 1)
    worker.ledger.refuse_with = None
    await until(lambda: job in worker.ledger.runs)  # taken again, by this worker
    assert worker.ledger.submits[-1].attempt >= 2
    assert bus.state(job)["crashes"] == "0"
    worker.ledger.finish(job)
    await until(lambda: bus.terminal(job))
    bus.audit(job)


async def test_workers_show_themselves_and_take_their_line_away(bus: Bus) -> None:
    worker = await bus.worker(name="host-1")
    bus.submit()
    await until(lambda: worker.ledger.runs)
    await until(lambda: bus.client.hget(bus.keys.workers, "host-1"))
    about = json.loads(bus.client.hget(bus.keys.workers, "host-1"))
    assert abs(about["seen_ms"] / 1000 - time.time()) < 60
    assert about["model"] == "fake"
    assert about["ready"] is True
    bus.submit(bus.keys.jobs("low"))
    await until(lambda: len(worker.ledger.runs) == 2)
    worker.ledger.max_jobs = 0
    worker.ledger.say_capacity()
    await until(lambda: queue_status(bus.client, bus.queue).workers[0].load == 2)
    bus.submit()
    status = queue_status(bus.client, bus.queue)
    assert status.queued == {"high": 0, "normal": 1, "low": 0}
    assert status.running == {"high": 0, "normal": 1, "low": 1}
    assert status.workers[0].is_alive
    await worker.stop()
    assert bus.client.hgetall(bus.keys.workers) == {}
    status = queue_status(bus.client, bus.queue)
    assert status.queued == {"high": 0, "normal": 2, "low": 1}  # given back
    assert (status.running["normal"], status.workers) == (0, ())
    assert queue_status(bus.client, "unused").queued["normal"] == 0


async def test_a_queued_job_named_by_its_entry_is_cancelled_at_once(bus: Bus) -> None:
    worker = await bus.worker(max_jobs=1)
    running = bus.submit()
    await until(lambda: running in worker.ledger.runs)
    queued, named = bus.submit(), bus.submit(job="named")
    cancel(bus, queued)
    cancel(bus, named)
    done = await until(lambda: bus.terminal(queued))
    assert (done["reason"], bus.out(queued)[0][0]) == ("cancelled", "1-1")
    assert bus.terminal(named) is None
    worker.ledger.finish(running)
    await until(lambda: bus.terminal(named))
    assert len(worker.ledger.submits) == 1
    for job in (running, queued, named):
        bus.audit(job)
    bus.audit_queue()


async def test_a_job_with_a_name_is_not_cancelled_under_the_id_of_its_entry(bus: Bus) -> None:
    worker = await bus.worker(max_jobs=1)
    running = bus.submit()
    await until(lambda: running in worker.ledger.runs)
    entries = [bus.client.xadd(bus.keys.jobs(), {"prompt": "a", "job": "order-7"})]
    body = msgpack.packb({"prompt": "b", "job": "order-8"})
    entries.append(bus.client.xadd(bus.keys.jobs(), {"body": body}))
    last = bus.submit()
    for job in (*entries, last):
        cancel(bus, job)
    await until(lambda: bus.terminal(last))  # the wishes before it have been obeyed
    assert [bus.out(entry) for entry in entries] == [[], []]
    worker.ledger.finish(running)
    for job in ("order-7", "order-8"):
        await until(lambda job=job: job in worker.ledger.runs)
        worker.ledger.finish(job)
        done = await until(lambda job=job: bus.terminal(job))
        assert done["reason"] == "length"
    await until(lambda: bus.num_entries() == 0)
    bus.audit_queue()


async def test_large_entries_are_read_a_few_at_a_time(bus: Bus) -> None:
    ids = json.dumps([7] * 1_000_000)  # 3 MB
    for i in range(20):
        bus.client.xadd(bus.keys.jobs(), {"input_ids": ids, "job": f"big{i}"})
    lane = await Lane.connect(parse_redis_url(bus.server.url).seeds[0], 5.0)
    streams = (bus.keys.jobs("high"), bus.keys.jobs(), bus.keys.jobs("low"))
    for stream in streams:
        await lane.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    taken = await lane.call("EVAL", SOURCES["take"], 3, *streams, GROUP, "w", 100, 0)
    assert len(taken) == 16  # one page, then the limit of bytes
    lane.close()


@pytest.mark.parametrize("form", ["fields", "body"])
async def test_a_dead_job_sent_again_runs_under_a_new_id(bus: Bus, form: str) -> None:
    worker = await bus.worker()
    fields: dict[str, object] = {"prompt": "p", "max_tokens": 5, "idempotency_key": "k"}
    if form == "body":
        bus.client.xadd(bus.keys.jobs(), {"body": msgpack.packb({**fields, "job": "j"})})
    else:
        bus.submit(job="j", **fields)
    await until(lambda: "j" in worker.ledger.runs)
    worker.ledger.fail("j", Poisoned("it kills engines"), dead=True)
    await until(lambda: bus.terminal("j"))
    with bus.server.client(decode_responses=False) as client:
        letter = dead_letters.find(client, bus.queue, "j")
        assert (letter.code, letter.attempts, letter.reason) == ("poisoned", 1, "it kills engines")
        again = dead_letters.requeue(client, bus.queue, letter)
    run = await until(lambda: worker.ledger.runs.get(again))
    assert run.submit.prepared.request.prompt == "p"
    worker.ledger.step(again, 5)
    worker.ledger.finish(again)
    await until(lambda: bus.terminal(again))
    bus.audit(again)
    assert bus.client.xlen(bus.keys.dead) == 0
    bus.audit_queue()


@pytest.mark.parametrize("key", ["out", "job", "started"])
async def test_a_key_of_the_wrong_kind_costs_only_its_own_job(bus: Bus, key: str) -> None:
    if key == "started":
        bus.client.xadd(bus.keys.out("bad"), {"event": "started", "seq": "x"}, id="1-0")
        bus.client.hset(bus.keys.job("bad"), "crashes", "many")
    else:
        bus.client.set(getattr(bus.keys, key)("bad"), "a string")
    bus.submit(job="bad")
    bus.submit(job="bad", temperature="hot")
    good = bus.submit(max_tokens=5)
    worker = await bus.worker()
    await until(lambda: good in worker.ledger.runs)
    await until(lambda: bus.num_entries() == 1)
    letters = [fields["job"] for _, fields in bus.client.xrange(bus.keys.dead)]
    assert set(letters) == (set() if key == "started" else {"bad"})  # it is mended by the next id
    worker.ledger.step(good, 5)
    worker.ledger.finish(good)
    await until(lambda: bus.terminal(good))
    assert worker.monitor.is_ready
    bus.audit(good)


async def test_a_reply_key_replaced_while_the_job_runs_costs_only_that_job(bus: Bus) -> None:
    worker = await bus.worker()
    job, good = bus.submit(), bus.submit(max_tokens=2)
    await until(lambda: len(worker.ledger.runs) == 2)
    bus.client.set(bus.keys.out(job), "a string")
    worker.ledger.step(job)
    await until(lambda: job not in worker.ledger.runs)
    await until(lambda: bus.client.xlen(bus.keys.dead) == 1)
    worker.ledger.step(good, 2)
    worker.ledger.finish(good)
    await until(lambda: bus.terminal(good))
    bus.audit(good)
    assert (bus.num_entries(), bus.num_pending()) == (0, 0)
