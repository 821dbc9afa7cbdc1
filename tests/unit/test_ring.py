"""The ring inside one process: layout, checks, limits, sleep tickets."""

from __future__ import annotations

import struct

import pytest

from broker.ring import layout
from broker.ring.errors import RecordTooLarge, RingCorrupt, RingLayoutError
from broker.ring.ring import Ring, RingReader, RingWriter
from broker.ring.wake import Bell

TOP = 1 << 64


def make_ring(capacity_bytes: int, start: int = 0) -> Ring:
    return Ring.create(bytearray(layout.memory_bytes(capacity_bytes)), start)


def make_pair(capacity_bytes: int, start: int = 0) -> tuple[RingWriter, RingReader]:
    ring = make_ring(capacity_bytes, start)
    return RingWriter(ring), RingReader(ring)


def read_until_corrupt(reader: RingReader) -> None:
    """A hundred looks at a record that fails its checks; the last one raises."""
    for _ in range(100):
        assert reader.read_batch(5) == []


def test_an_empty_ring_has_nothing_to_read() -> None:
    _, reader = make_pair(256)
    assert reader.read() is None
    assert reader.read_batch(10) == []
    assert not reader.has_records()


@pytest.mark.parametrize("payload", [b"", b"x", b"12345678", b"a" * 108], ids=len)
def test_a_record_comes_out_as_it_went_in(payload: bytes) -> None:
    writer, reader = make_pair(256)
    assert writer.try_write(7, payload)
    assert reader.read() == (7, payload)
    assert reader.read() is None


def test_any_contiguous_buffer_is_a_payload() -> None:
    writer, reader = make_pair(256)
    assert writer.try_write(1, bytearray(b"abc"))
    assert writer.try_write(2, memoryview(struct.pack("=3i", 1, 2, 3)).cast("i"))
    assert reader.read_batch(9) == [(1, b"abc"), (2, struct.pack("=3i", 1, 2, 3))]


def test_a_full_ring_refuses_until_the_reader_made_room() -> None:
    writer, reader = make_pair(64)
    assert writer.try_write(1, b"x" * 12)
    assert writer.try_write(2, b"y" * 12)
    assert not writer.try_write(3, b"z" * 12)
    assert writer.used_bytes() == 64
    assert reader.read() == (1, b"x" * 12)
    assert writer.try_write(3, b"z" * 12)
    assert reader.read_batch(9) == [(2, b"y" * 12), (3, b"z" * 12)]


def test_the_largest_record_fits_at_every_position() -> None:
    capacity_bytes = 128
    for start in range(0, capacity_bytes, 8):
        writer, reader = make_pair(capacity_bytes, start)
        payload = bytes(range(writer.max_payload_bytes))
        assert writer.try_write(1, payload)
        assert reader.read() == (1, payload)


def test_a_record_over_half_the_ring_is_refused_and_nothing_changes() -> None:
    writer, reader = make_pair(128)
    with pytest.raises(RecordTooLarge, match="limit of 44 bytes"):
        writer.try_write(1, b"x" * 45)
    assert writer.used_bytes() == 0
    assert reader.read() is None


@pytest.mark.parametrize("kind", [0, -1])
def test_kind_zero_belongs_to_the_ring_itself(kind: int) -> None:
    writer, _ = make_pair(128)
    with pytest.raises(ValueError, match="kind"):
        writer.try_write(kind, b"")


@pytest.mark.parametrize("start", [TOP - 8, TOP - 64, TOP - 128])
def test_positions_wrap_at_two_to_the_64(start: int) -> None:
    writer, reader = make_pair(64, start)
    for number in range(40):
        assert writer.try_write(1, bytes([number]))
        assert reader.read() == (1, bytes([number]))


@pytest.mark.parametrize("size_bytes", [0, 640, 640 + 63, 640 + 32, 640 + 96])
def test_a_buffer_of_the_wrong_size_is_no_ring(size_bytes: int) -> None:
    with pytest.raises(RingLayoutError, match="power of two"):
        Ring.create(bytearray(size_bytes))


def test_misaligned_memory_is_refused_because_its_counters_would_tear() -> None:
    memory = memoryview(bytearray(layout.memory_bytes(64) + 1))[1:]
    with pytest.raises(RingLayoutError, match="aligned"):
        Ring.create(memory)


def test_read_only_memory_is_refused() -> None:
    with pytest.raises(RingLayoutError, match="writable"):
        Ring.create(memoryview(bytes(layout.memory_bytes(64))))


@pytest.mark.parametrize("start", [4, -8, TOP])
def test_a_start_position_off_the_grid_is_refused(start: int) -> None:
    with pytest.raises(RingLayoutError, match="start"):
        make_ring(64, start)


def test_attach_refuses_memory_that_no_ring_was_made_in() -> None:
    with pytest.raises(RingLayoutError, match="magic"):
        Ring.attach(bytearray(layout.memory_bytes(64)))


def test_attach_sees_what_was_written_before() -> None:
    memory = bytearray(layout.memory_bytes(256))
    assert RingWriter(Ring.create(memory)).try_write(5, b"early")
    assert RingReader(Ring.attach(memory)).read() == (5, b"early")


def test_a_released_ring_lets_its_memory_be_resized() -> None:
    memory = bytearray(layout.memory_bytes(64))
    ring = Ring.create(memory)
    ring.release()
    memory.extend(b"x")  # BufferError while a view is left


@pytest.mark.parametrize("flipped", range(24), ids=lambda at: f"byte{at}")
def test_a_flipped_bit_is_not_yet_and_later_corrupt(flipped: int) -> None:
    ring = make_ring(256)
    writer, reader = RingWriter(ring), RingReader(ring, corrupt_after_s=0.0)
    assert writer.try_write(1, b"data")
    ring.data[flipped] ^= 0x10
    for _ in range(99):
        assert reader.read() is None
    ring.data[flipped] ^= 0x10
    assert reader.read() == (1, b"data")

    assert writer.try_write(1, b"data")
    ring.data[32 - 8 + flipped] ^= 0x10
    with pytest.raises(RingCorrupt, match="position 24"):
        read_until_corrupt(reader)


def test_records_before_a_corrupt_one_are_delivered() -> None:
    ring = make_ring(256)
    writer, reader = RingWriter(ring), RingReader(ring, corrupt_after_s=0.0)
    for number in (1, 2, 3):
        assert writer.try_write(number, b"")
    ring.data[2 * 24 + 8] ^= 1
    assert reader.read_batch(9) == [(1, b""), (2, b"")]
    with pytest.raises(RingCorrupt):
        read_until_corrupt(reader)


def test_an_impossible_counter_is_corrupt_on_either_side() -> None:
    ring = make_ring(64)
    writer, reader = RingWriter(ring), RingReader(ring, corrupt_after_s=0.0)
    ring.counters[layout.WRITE_POS_AT] = 4096
    with pytest.raises(RingCorrupt):
        read_until_corrupt(reader)
    ring.counters[layout.READ_POS_AT] = 4096
    with pytest.raises(RingCorrupt, match="read position 4096"):
        writer.used_bytes()


def test_a_sleep_is_announced_only_while_the_ring_is_empty() -> None:
    writer, reader = make_pair(256)
    assert reader.prepare_wait()
    reader.finish_wait()
    assert writer.try_write(1, b"")
    assert not reader.prepare_wait()


def test_one_sleep_costs_one_ring_of_the_bell_however_many_records_come() -> None:
    bell = CountingBell()
    ring = make_ring(1024)
    writer, reader = RingWriter(ring, reader_bell=bell), RingReader(ring, reader_bell=bell)
    for _ in range(5):
        assert writer.try_write(1, b"awake")
    assert bell.rings == 0
    reader.read_batch(5)
    assert reader.prepare_wait()
    for _ in range(5):
        assert writer.try_write(1, b"asleep")
    assert bell.rings == 1
    assert reader.wait(timeout_s=0)
    reader.finish_wait()
    assert len(reader.read_batch(9)) == 5
    assert reader.prepare_wait()
    assert writer.try_write(1, b"asleep again")
    assert bell.rings == 2
    bell.close()


def test_wait_returns_at_once_when_a_record_is_there_and_false_when_time_is_up() -> None:
    bell = Bell()
    ring = make_ring(256)
    writer, reader = RingWriter(ring, reader_bell=bell), RingReader(ring, reader_bell=bell)
    assert not reader.wait(timeout_s=0.001, spin_s=0.0005)
    assert writer.try_write(1, b"")
    assert reader.wait(timeout_s=60)
    bell.close()


def test_wait_ends_early_when_the_watched_descriptor_turns_readable() -> None:
    bell, peer_gone = Bell(), Bell()
    reader = RingReader(make_ring(256), reader_bell=bell)
    peer_gone.ring()
    assert not reader.wait(timeout_s=60, watch_fd=peer_gone.fileno())
    bell.close()
    peer_gone.close()


def test_a_writer_that_waits_for_room_is_woken_by_the_reader() -> None:
    bell = CountingBell()
    ring = make_ring(64)
    writer, reader = RingWriter(ring, writer_bell=bell), RingReader(ring, writer_bell=bell)
    assert writer.has_room(12)
    assert not writer.prepare_wait(12)
    assert writer.try_write(1, b"x" * 12)
    assert writer.try_write(1, b"x" * 12)
    assert not writer.has_room(12)
    assert writer.prepare_wait(12)
    assert bell.rings == 0
    reader.read()
    assert bell.rings == 1
    writer.finish_wait()
    assert writer.wait(12, timeout_s=60)
    assert writer.try_write(1, b"x" * 12)
    assert not writer.wait(12, timeout_s=0.001)
    bell.close()


def test_a_ring_without_bells_cannot_be_polled() -> None:
    writer, reader = make_pair(64)
    for side in (writer, reader):
        with pytest.raises(ValueError, match="no bell"):
            side.fileno()


class CountingBell(Bell):
    """A bell that knows how often it was rung."""

    def __init__(self) -> None:
        super().__init__()
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1
        super().ring()
