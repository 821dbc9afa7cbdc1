"""Order of the queue: tenants by tokens, priorities with a share, limits, removal."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.config import QueueConfig
from broker.queue import FairQueue, Ticket
from tokenbus.errors import Busy

HIGH, NORMAL, LOW = 0, 1, 2


def fill(
    queue: FairQueue, count: int, tenant: str, priority: int = NORMAL, cost: int = 100
) -> None:
    for i in range(count):
        queue.admit(Ticket(f"{tenant}-{priority}-{i}", tenant, priority, cost))


def take(queue: FairQueue, count: int) -> list[Ticket]:
    tickets = [queue.pop() for _ in range(count)]
    return [t for t in tickets if t is not None]


def test_one_tenants_jobs_run_in_the_order_they_came() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 5, "a")
    assert [t.job for t in take(queue, 6)] == [f"a-1-{i}" for i in range(5)]
    assert len(queue) == 0


def test_the_doors_of_a_tenant_take_turns_whatever_waits_at_one_of_them() -> None:
    queue = FairQueue(QueueConfig())
    for i in range(1_000):
        queue.admit(Ticket(f"zmq-{i}", "a", NORMAL, 100, door="zmq"))
    for i in range(3):
        queue.admit(Ticket(f"redis-{i}", "a", NORMAL, 100, door="redis"))
    first = [t.job for t in take(queue, 8)]
    assert [job for job in first[:6] if job.startswith("redis")] == [
        "redis-0",
        "redis-1",
        "redis-2",
    ]
    assert [job for job in first if job[0] == "z"] == [f"zmq-{i}" for i in range(5)]


def test_a_door_that_was_served_is_not_next_because_its_other_job_was_taken_back() -> None:
    queue = FairQueue(QueueConfig())
    for job, door in (("a", "zmq"), ("b", "zmq"), ("c", "redis"), ("d", "redis")):
        queue.admit(Ticket(job, "t", NORMAL, 1, door=door))
    assert [t.job for t in take(queue, 1)] == ["a"]
    assert queue.remove("c")
    assert [t.job for t in take(queue, 2)] == ["d", "b"]


def test_a_tenant_with_two_jobs_does_not_wait_for_one_with_thousands() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 5000, "flood")
    fill(queue, 2, "small")
    first = [t.tenant for t in take(queue, 6)]
    assert first.count("small") == 2


def test_tenants_share_by_tokens_not_by_jobs() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 300, "long", cost=1000)
    fill(queue, 3000, "short", cost=100)
    tokens: Counter[str] = Counter()
    while tokens.total() < 100_000:
        ticket = queue.pop()
        assert ticket is not None
        tokens[ticket.tenant] += ticket.cost_tokens
    assert abs(tokens["long"] - tokens["short"]) <= 2_000


def test_a_refund_lets_a_tenant_spend_what_its_job_did_not_use() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 100, "a", cost=1000)
    fill(queue, 100, "b", cost=1000)
    taken: Counter[str] = Counter()
    for _ in range(60):
        (ticket,) = take(queue, 1)
        taken[ticket.tenant] += 1
        if ticket.tenant == "a":
            queue.refund(ticket, 500)  # a's jobs cost half
    assert taken["a"] == pytest.approx(40, abs=2)


def test_higher_priorities_go_first_and_low_keeps_its_share() -> None:
    queue = FairQueue(QueueConfig(low_share=0.1))
    fill(queue, 1000, "t", HIGH)
    fill(queue, 1000, "t", LOW)
    levels = Counter(t.priority for t in take(queue, 550))
    assert levels[LOW] == pytest.approx(50, abs=2)


def test_without_contention_low_priority_runs_at_once() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 3, "t", LOW)
    assert len(take(queue, 3)) == 3


def test_normal_is_not_starved_by_high() -> None:
    queue = FairQueue(QueueConfig(low_share=0.1))
    fill(queue, 1000, "t", HIGH)
    fill(queue, 10, "t", NORMAL)
    assert sum(t.priority == NORMAL for t in take(queue, 120)) >= 9


def test_a_job_that_ran_before_goes_to_the_front() -> None:
    queue = FairQueue(QueueConfig(max_queued=3))
    fill(queue, 3, "a", HIGH)
    queue.requeue(Ticket("back", "b", LOW, 10))  # a full queue does not refuse it
    ticket = queue.pop()
    assert ticket is not None
    assert ticket.job == "back"


def test_limits_are_refused_with_a_time_to_retry() -> None:
    now_s = [0.0]
    queue = FairQueue(QueueConfig(max_queued=4, max_queued_per_tenant=3), lambda: now_s[0])
    fill(queue, 3, "a")
    with pytest.raises(Busy) as caught:
        queue.admit(Ticket("x", "a", NORMAL, 1))
    assert (caught.value.field, caught.value.retry_ms) == ("tenant", 1000)
    queue.admit(Ticket("y", "b", NORMAL, 1))
    with pytest.raises(Busy, match="holds 4 jobs"):
        queue.admit(Ticket("z", "c", NORMAL, 1))
    take(queue, 2)
    now_s[0] = 10.0
    assert queue.retry_ms() == 1000  # 5 s a job, 2 waiting, a tenth of it
    queue.admit(Ticket("x", "a", NORMAL, 1))


class QueueMachine(RuleBasedStateMachine):
    """Against a set: nothing is lost, doubled or served after it was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(QueueConfig(max_queued=30, max_queued_per_tenant=12))
        self.waiting: dict[str, Ticket] = {}
        self.count = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, 2),
        cost=st.integers(1, 5000),
        door=st.sampled_from(["zmq", "redis"]),
    )
    def admit(self, tenant: str, priority: int, cost: int, door: str) -> None:
        self.count += 1
        ticket = Ticket(f"j{self.count}", tenant, priority, cost, door)
        try:
            self.queue.admit(ticket)
        except Busy:
            same_tenant = sum(t.tenant == tenant for t in self.waiting.values())
            assert len(self.waiting) >= 30 or same_tenant >= 12
            return
        self.waiting[ticket.job] = ticket

    @rule()
    def pop(self) -> None:
        ticket = self.queue.pop()
        if ticket is None:
            assert not self.waiting
        else:
            assert self.waiting.pop(ticket.job) == ticket

    @rule()
    def pop_and_requeue(self) -> None:
        ticket = self.queue.pop()
        if ticket is not None:
            self.queue.requeue(ticket)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = [*self.waiting, "unknown"]
        job = data.draw(st.sampled_from(known))
        assert self.queue.remove(job) == (job in self.waiting)
        self.waiting.pop(job, None)

    @invariant()
    def the_count_is_right(self) -> None:
        assert len(self.queue) == len(self.waiting)


def test_a_barred_tenant_is_passed_over_at_every_priority() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 3, "flood", HIGH)
    fill(queue, 3, "flood", NORMAL)
    assert queue.pop(barred="flood") is None
    fill(queue, 1, "other", LOW)
    ticket = queue.pop(barred="flood")
    assert ticket is not None
    assert ticket.tenant == "other"
    assert len(take(queue, 10)) == 6


def test_a_newcomer_is_served_before_the_second_next_job_of_a_flood() -> None:
    queue = FairQueue(QueueConfig())
    fill(queue, 1000, "flood", cost=30)
    take(queue, 500)
    fill(queue, 1, "new", cost=30)
    assert "new" in [t.tenant for t in take(queue, 2)]


TestQueueMachine = QueueMachine.TestCase
