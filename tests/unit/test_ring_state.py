"""Every interleaving of both sides at every access to a shared counter, as a state machine.

The counters of each side are wrapped so that the other side may act right before and after each
load and store. Between two accesses a side only touches memory that the other must not look at, so
these are all the places where the order matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.ring import layout
from broker.ring.ring import Ring, RingReader, RingWriter

TOP = 1 << 64

sizes = st.one_of(st.sampled_from([0, 1, 4, 12, 2**20]), st.integers(0, 300))
# What the other side does at each counter access of this one; None: nothing.
reads_between = st.lists(st.none() | st.integers(1, 5), max_size=6)
writes_between = st.lists(st.none() | st.integers(0, 300), max_size=5)


class HookedCounters:
    """The u64 counters, with a call before and after each access by this side."""

    def __init__(self, counters: memoryview) -> None:
        self.counters = counters
        self.before: Callable[[], None] = lambda: None
        self.stored: Callable[[int], None] = lambda at: None

    def __getitem__(self, at: int) -> int:
        self.before()
        return self.counters[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.before()
        self.counters[at] = value
        self.stored(at)
        self.before()


class RingMachine(RuleBasedStateMachine):
    """Consumed is always the prefix of produced, in order, and the ring's own arithmetic agrees."""

    @initialize(
        capacity_bytes=st.sampled_from([64, 128, 256, 1024]),
        start=st.one_of(
            st.just(0),
            st.integers(0, 1 << 20).map(lambda n: n * 8),
            st.integers(1, 200).map(lambda n: TOP - n * 8),
        ),
    )
    def make(self, capacity_bytes: int, start: int) -> None:
        memory = bytearray(layout.memory_bytes(capacity_bytes))
        self.ring = Ring.create(memory, start)
        self.writer_counters = HookedCounters(self.ring.counters)
        self.reader_counters = HookedCounters(self.ring.counters)
        self.writer = RingWriter(self.side(memory, self.writer_counters))
        self.reader = RingReader(self.side(memory, self.reader_counters))
        self.capacity_bytes = capacity_bytes
        self.write_pos = self.read_pos = start
        self.visible: deque[tuple[int, bytes, int]] = deque()  # kind, payload, end position
        self.count = self.published = 0

    def side(self, memory: bytearray, counters: HookedCounters) -> Ring:
        ring = Ring.attach(memory)
        hooked: Any = counters
        ring.counters.release()
        ring.counters = hooked
        return ring

    @rule(size=sizes, reads=reads_between, late=st.sampled_from(["", "all", "payload"]))
    def write(self, size: int, reads: list[int | None], late: str) -> None:
        """One write; the reader may act at each of its counter accesses.

        late plays a processor that shows the new counter before all or a part of the new data.
        """
        self.count += 1
        size = min(size, self.writer.max_payload_bytes)
        payload = self.count.to_bytes(8, "little")[:size].ljust(size, b"p")
        record_bytes = -(-(size + 20) // 8) * 8
        tail = self.capacity_bytes - self.write_pos % self.capacity_bytes
        needed = record_bytes + (tail if record_bytes > tail else 0)
        fits = self.used() + needed <= self.capacity_bytes
        data_before = bytes(self.ring.data)
        pending = deque(reads)

        def let_reader_act() -> None:
            if pending and (max_records := pending.popleft()):
                self.check_read(max_records)

        def publish(at: int) -> None:
            if at != layout.WRITE_POS_AT:
                return
            data_now = bytes(self.ring.data)
            data_seen = bytearray(data_before)
            if late == "payload":
                begin = (self.write_pos + needed - record_bytes) % self.capacity_bytes
                data_seen[begin : begin + 20] = data_now[begin : begin + 20]
            if late and data_seen != data_now:
                self.ring.data[:] = data_seen
                self.check_read(len(self.visible) + 1)
                self.ring.data[:] = data_now
            self.published = self.count
            self.write_pos = (self.write_pos + needed) % TOP
            self.visible.append((self.count, payload, self.write_pos))

        self.writer_counters.before = let_reader_act
        self.writer_counters.stored = publish
        wrote = self.writer.try_write(self.count, payload)
        self.writer_counters.before = lambda: None
        assert wrote or not fits
        assert wrote == (self.published == self.count)

    @rule(max_records=st.integers(1, 6), writes=writes_between)
    def read(self, max_records: int, writes: list[int | None]) -> None:
        """One batch; the writer may act at each of the reader's counter accesses."""
        self.let_writer_act(writes)
        expected_at_least = min(max_records, len(self.visible))
        got = self.reader.read_batch(max_records)
        self.reader_counters.before = lambda: None
        assert len(got) >= expected_at_least
        self.consume(got)

    @rule()
    def read_one(self) -> None:
        expected = self.visible[0][:2] if self.visible else None
        got = self.reader.read()
        assert got == expected
        if got is not None:
            self.consume([got])

    @precondition(lambda self: self.visible)
    @rule()
    def drain(self) -> None:
        self.check_read(len(self.visible))
        assert not self.visible

    @rule(writes=writes_between)
    def sleep(self, writes: list[int | None]) -> None:
        """The reader goes to sleep while the writer writes: it is told, or it sees the record."""
        self.let_writer_act(writes)
        may_poll = self.reader.prepare_wait()
        self.reader_counters.before = lambda: None
        ticket = self.ring.counters[layout.READER_TICKET_AT]
        assert ticket % 2 == int(may_poll)
        if may_poll:
            assert not self.visible
            self.reader.finish_wait()

    def let_writer_act(self, writes: list[int | None]) -> None:
        """At its next counter accesses the reader is interrupted by these writes."""
        pending = deque(writes)

        def act() -> None:
            if pending and (size := pending.popleft()) is not None:
                self.reader_counters.before = lambda: None
                self.write(size, [], "")
                self.reader_counters.before = act

        self.reader_counters.before = act

    def check_read(self, max_records: int) -> None:
        """A batch with the writer standing still: exactly what is visible, in order."""
        expected = [record[:2] for record in list(self.visible)[:max_records]]
        got = self.reader.read_batch(max_records)
        assert got == expected
        self.consume(got)

    def consume(self, got: list[tuple[int, bytes]]) -> None:
        for record in got:
            *expected, end = self.visible.popleft()
            assert record == tuple(expected)
            self.read_pos = end

    def used(self) -> int:
        return (self.write_pos - self.read_pos) % TOP

    @invariant()
    def counters_agree_with_the_model(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert self.ring.counters[layout.WRITE_POS_AT] == self.write_pos
        assert self.ring.counters[layout.READ_POS_AT] == self.read_pos
        assert self.used() <= self.capacity_bytes


RingMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestRingInterleavings = RingMachine.TestCase
