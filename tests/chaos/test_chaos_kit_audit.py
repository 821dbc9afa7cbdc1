"""The auditors find every fault they are there for, and nothing in a clean log."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ops.bench.chaos_audit import AuditError, EventAuditor, RedisAuditor, Seen, audit_job, crc_of
from tests.redis_servers import RedisServer
from tokenbus.errors import Busy
from tokenbus.events import Done, Failed, Started, Tokens, Usage

CLEAN = [
    Seen("j", "started", 1),
    Seen("j", "tokens", 1, 1, (5,), "a"),
    Seen("j", "tokens", 1, 2, (6, 7), "b"),
    Seen("j", "started", 2),
    Seen("j", "tokens", 2, 4, (8,), "c"),
    Seen("j", "done", 2, 4, crc=crc_of([5, 6, 7, 8]), completion_tokens=4),
]
_queues = itertools.count()


def changed(at: int, **fields: Any) -> list[Seen]:
    events = list(CLEAN)
    events[at] = dataclasses.replace(events[at], **fields)
    return events


def test_a_clean_log_has_no_problems() -> None:
    assert audit_job("j", CLEAN) == []
    assert audit_job("j", [Seen("j", "error")]) == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (CLEAN[:-1], "0 terminal events"),
        ([], "0 terminal events"),
        ([*CLEAN, CLEAN[-1]], "2 terminal events"),
        ([*CLEAN, CLEAN[1]], "done is not the last"),
        (CLEAN[:1] + CLEAN[2:], "tokens at seq 2, expected 1"),
        ([*CLEAN[:2], *CLEAN[1:]], "tokens at seq 1, expected 2"),
        (changed(4, attempt=1), "attempt 1 after attempt 2"),
        (changed(3, attempt=1), "attempt 1 started twice"),
        (changed(5, crc=1), "crc 1"),
        (changed(5, seq=5), "last seq 5, saw 4"),
        (changed(5, completion_tokens=3), "usage states 3"),
        (changed(1, ids=(9,)), "crc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_is_named(events: list[Seen], message: str) -> None:
    assert any(message in problem for problem in audit_job("j", events))


def test_the_crc_is_the_one_of_the_protocol() -> None:
    assert crc_of([1, 2, 70_000]) == _crc_by_hand([1, 2, 70_000])


def _crc_by_hand(ids: list[int]) -> int:
    """CRC-32 bit by bit, so that the auditor's is checked against another one."""
    crc = 0xFFFF_FFFF
    for byte in b"".join(token.to_bytes(4, "little") for token in ids):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB8_8320 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def test_the_event_auditor_reads_the_python_client_s_events() -> None:
    auditor = EventAuditor()
    auditor.see_tokenbus(Started("a", 1, "w", 7, 3))
    auditor.see_tokenbus(Tokens("a", 1, 1, (5, 6), "hi"))
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    auditor.see_tokenbus(Done("a", 1, 2, "stop", "!", usage, crc_of([5, 6])))
    auditor.see_tokenbus(Failed("b", 1, 0, Busy("full")))
    auditor.check(["a", "b"])
    assert auditor.text_of("a") == "hi!"
    assert auditor.ids_of("a") == [5, 6]


def test_the_event_auditor_misses_jobs_and_notices_strangers() -> None:
    auditor = EventAuditor()
    auditor.see(Seen("stranger", "error"))
    with pytest.raises(AuditError, match=r"(?s)lost: 0 terminal.*stranger: events of a job"):
        auditor.check(["lost"])


class Queue:
    """A queue in Redis as a worker leaves it after one job."""

    def __init__(self, server: RedisServer) -> None:
        self.name = f"audit{next(_queues)}"
        self.prefix = f"tokenbus:{{{self.name}}}:"
        self.redis: Any = server.client()
        self.auditor = RedisAuditor(self.redis, self.name)
        self.redis.xgroup_create(f"{self.prefix}jobs", "workers", id="0", mkstream=True)
        self.add("1-0", event="started", attempt="1", worker="w", seed="1", prompt_tokens="2")
        self.add("1-2", event="tokens", seq="1", ids="[5,6]", text="hi")
        self.add("2-0", event="started", attempt="2", worker="v", seed="1", prompt_tokens="2")
        self.add("2-3", event="tokens", seq="3", ids="[7]", text="!")
        usage = json.dumps({"completion_tokens": 3})
        self.add("2-4", event="done", reason="stop", usage=usage, crc=str(crc_of([5, 6, 7])))
        self.redis.hset(f"{self.prefix}job:j", "state", "done")
        for key in ("out:j", "job:j"):
            self.redis.expire(self.prefix + key, 3600)
        self.redis.hset(f"{self.prefix}workers", "w", "{}")

    def add(self, entry: str, **fields: str) -> None:
        self.redis.xadd(f"{self.prefix}out:j", fields, id=entry)


@pytest.fixture
def queue(shared_redis: RedisServer) -> Iterator[Queue]:
    queue = Queue(shared_redis)
    yield queue
    queue.redis.delete(*queue.redis.keys(queue.prefix + "*"))
    queue.redis.close()


def test_a_clean_queue_passes(queue: Queue) -> None:
    queue.auditor.check(["j"])
    assert queue.auditor.text_of("j") == "hi!"
    assert queue.auditor.ids_of("j") == [5, 6, 7]


def leave_a_job(queue: Queue) -> None:
    queue.redis.xadd(f"{queue.prefix}jobs:low", {"prompt": "x"})


def leave_a_pending_entry(queue: Queue) -> None:
    queue.redis.xadd(f"{queue.prefix}jobs", {"prompt": "x"})
    queue.redis.xreadgroup("workers", "w", {f"{queue.prefix}jobs": ">"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leave_a_job, "jobs:low: 1 entries left"),
        (leave_a_pending_entry, "group workers holds 1 entries"),
        (lambda q: q.redis.persist(q.prefix + "out:j"), "out:j: has no TTL"),
        (lambda q: q.redis.set(q.prefix + "cancel:x", "1"), "cancel:x: has no TTL"),
        (lambda q: q.redis.set(q.prefix + "debris", "1", ex=9), "debris: no key of the documented"),
        (lambda q: q.redis.hset(q.prefix + "job:j", "state", "running"), "state 'running'"),
        (lambda q: q.redis.xdel(q.prefix + "out:j", "2-4"), "0 terminal events"),
        (lambda q: q.redis.xdel(q.prefix + "out:j", "1-2"), "tokens at seq 3, expected 1"),
        (lambda q: q.redis.xdel(q.prefix + "out:j", "2-0"), "attempt 2 has tokens but no started"),
        (lambda q: q.add("2-5", event="error", code="x", message="", retry="false"), "2 terminal"),
        (lambda q: q.add("3-9", event="tokens", seq="4", ids="[1]", text=""), "holds seqs 4..4"),
        (lambda q: q.add("3-0", event="party"), "event 'party'"),
        (lambda q: q.add("3-0", text="x"), "unreadable out stream"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_damage_to_a_queue_is_named(
    queue: Queue, damage: Callable[[Queue], object], message: str
) -> None:
    damage(queue)
    with pytest.raises(AuditError) as failure:
        queue.auditor.check(["j"])
    assert any(message in problem for problem in failure.value.problems)


def test_a_job_that_left_nothing_is_a_problem(queue: Queue) -> None:
    with pytest.raises(AuditError, match="lost: 0 terminal events"):
        queue.auditor.check(["lost"])
