"""Mailboxes, bursts, overflow and crash reports of the actor base."""

from __future__ import annotations

import asyncio
import time

from broker.actor import BURST_MESSAGES, BURST_S, Actor, ActorSystem, Overflow
from broker.actor_system import TURN_BURSTS


class Recorder(Actor):
    """Keeps what it is told; raises on the string "boom"."""

    def __init__(self, system: ActorSystem, **options: object) -> None:
        super().__init__(system, "recorder", **options)  # type: ignore[arg-type]
        self.seen: list[object] = []
        self.bursts: list[int] = []
        self.stopped = False

    def handle(self, message: object) -> None:
        if message == "boom":
            raise ValueError("no such thing")
        self.seen.append(message)

    def after_burst(self) -> None:
        self.bursts.append(len(self.seen))

    async def stop(self) -> None:
        self.stopped = True


async def turn() -> None:
    """Let the loop call what is ready."""
    for _ in range(4):
        await asyncio.sleep(0)


def make(**options: object) -> Recorder:
    return Recorder(ActorSystem(asyncio.get_running_loop()), **options)


async def test_messages_told_in_one_turn_are_handled_in_one_burst_and_in_order() -> None:
    actor = make()
    for i in range(5):
        assert actor.tell(i)
    assert actor.seen == []  # never at once: the receiver is not re-entered
    await turn()
    assert actor.seen == [0, 1, 2, 3, 4]
    assert actor.bursts == [5]


class Player(Actor):
    """Sends every number that it gets to the next player, one higher, until it is `last`."""

    def __init__(self, system: ActorSystem, name: str, last: int) -> None:
        super().__init__(system, name)
        self.next = self
        self.last = last
        self.seen: list[int] = []
        self._is_in_hand = False

    def handle(self, message: object) -> None:
        assert isinstance(message, int)
        assert not self._is_in_hand
        self._is_in_hand = True
        self.seen.append(message)
        if message < self.last:
            self.next.tell(message + 1)
        self._is_in_hand = False


def pair(last: int) -> tuple[Player, Player]:
    system = ActorSystem(asyncio.get_running_loop())
    one, two = Player(system, "one", last), Player(system, "two", last)
    one.next, two.next = two, one
    return one, two


async def test_a_long_mailbox_gives_others_a_turn_between_bursts() -> None:
    actor, (other, _) = make(), pair(0)
    bursts_before: list[int] = []
    other.after_burst = lambda: bursts_before.append(len(actor.bursts))  # type: ignore[method-assign]
    other.system = actor.system
    for i in range(BURST_MESSAGES + 10):
        actor.tell(i)
    other.tell(0)
    await turn()
    assert actor.bursts == [BURST_MESSAGES, BURST_MESSAGES + 10]
    assert bursts_before == [1]


async def test_a_message_passes_through_actors_within_one_turn_and_re_enters_none() -> None:
    one, two = pair(last=6)
    one.tell(1)
    await asyncio.sleep(0)
    assert (one.seen, two.seen) == ([1, 3, 5], [2, 4, 6])


async def test_what_a_reader_or_a_timer_sends_is_handled_right_after_it() -> None:
    one, two = pair(last=2)
    one.guard(lambda: bool(one.tell(1)) or None)()
    assert (one.seen, two.seen) == ([1], [2])


async def test_actors_that_never_stop_talking_leave_the_loop_its_turns() -> None:
    one, two = pair(last=1 << 60)
    one.tell(1)
    for _ in range(10):
        before = len(one.seen)
        await asyncio.sleep(0)
        assert 0 < len(one.seen) - before <= TURN_BURSTS
    await one.close()
    await two.close()


async def test_a_full_mailbox_with_refuse_keeps_nothing_and_says_so() -> None:
    actor = make(capacity=2, overflow=Overflow.REFUSE)
    assert [actor.tell(i) for i in range(3)] == [True, True, False]
    await turn()
    assert actor.seen == [0, 1]
    assert actor.tell(3)


async def test_a_full_mailbox_with_crash_stops_the_system() -> None:
    actor = make(capacity=1, overflow=Overflow.CRASH)
    actor.tell(0)
    assert not actor.tell(1)
    crash = actor.system.crashed.result()
    assert crash.actor == "recorder"
    assert "holds 1 messages" in str(crash)


async def test_a_crash_report_names_the_actor_and_the_last_message_type() -> None:
    actor = make()
    actor.tell(1)
    actor.tell("boom")
    actor.tell(2)
    await turn()
    crash = actor.system.crashed.result()
    assert str(crash) == "actor recorder crashed at str: ValueError: no such thing"
    assert actor.seen == [1]  # nothing after the crash


async def test_an_exception_in_a_task_or_a_timer_is_a_crash() -> None:
    async def broken() -> None:
        raise RuntimeError("task")

    actor = make()
    actor.spawn(broken(), "broken")
    await turn()
    assert actor.system.crashed.result().last_message == "recorder.broken"

    def tick() -> None:
        raise RuntimeError("timer")

    other = make()
    other.every(0.0, tick)
    crash = await asyncio.wait_for(asyncio.shield(other.system.crashed), 5)
    assert crash.last_message == "tick"


async def test_close_hands_over_what_is_in_the_mailbox_then_stops_and_refuses() -> None:
    actor = make()
    actor.tell(1)
    await actor.close()
    assert (actor.seen, actor.stopped) == ([1], True)
    assert not actor.tell(2)


async def test_actors_stop_in_reverse_order_of_their_start() -> None:
    system = ActorSystem(asyncio.get_running_loop())
    order: list[str] = []

    class Named(Actor):
        def start(self) -> None:
            order.append(f"start {self.name}")

        def handle(self, message: object) -> None:
            raise AssertionError(f"nobody sends anything, got {message!r}")

        async def stop(self) -> None:
            order.append(f"stop {self.name}")

    Named(system, "a")
    Named(system, "b")
    system.start()
    await system.stop()
    assert order == ["start a", "start b", "stop b", "stop a"]


async def test_slow_messages_give_the_loop_a_turn_after_a_few() -> None:
    class Slow(Recorder):
        def handle(self, message: object) -> None:
            time.sleep(BURST_S / 4)
            super().handle(message)

    actor = Slow(ActorSystem(asyncio.get_running_loop()))
    for i in range(40):
        actor.tell(i)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(actor.seen) <= 16
    while len(actor.seen) < 40:
        await asyncio.sleep(0)
    assert actor.seen == list(range(40))
