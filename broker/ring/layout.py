"""Where everything lies inside a ring's memory, and the two writes that need care.

    byte 0      magic, layout version, capacity              written once, by the creator
    byte 128    write position  (u64)                        stored by the writer only
    byte 256    read position   (u64)                        stored by the reader only
    byte 384    reader's sleep ticket (u64, odd = asleep)    stored by the reader only
    byte 512    writer's sleep ticket (u64, odd = asleep)    stored by the writer only
    byte 640    data, `capacity` bytes (a power of two)

Each counter has a 128-byte line of its own (x86 prefetches cache lines in pairs of 64), so a store
by one side never slows the other side's own counter.

Positions count bytes, only grow, and wrap at 2^64. As the capacity divides 2^64, the place in the
data is `position & (capacity - 1)` also across that wrap, and `write - read` (mod 2^64) is what is
in between.

A record starts at a multiple of 8 and never runs over the end of the data:

    u64 stamp    the write position at which this record starts
    u32 length   of the payload, in bytes
    u32 kind     0 = skip (see below)
    u32 crc      CRC-32 over the 16 bytes before it and the payload
    payload, then 0 to 7 bytes of padding

When a record does not fit before the end, the rest is skipped. If a header fits there, it says so
with a record of kind 0, whose `length` covers the rest and whose CRC is over the header alone; if
none fits, no record can start there and both sides step over the rest without a word.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from broker.ring.errors import RingLayoutError

MAGIC: Final = 0x31474E4952425442  # "BTBRING1" as a little-endian word
LINE_BYTES: Final = 128
DATA_OFFSET: Final = 5 * LINE_BYTES
MIN_CAPACITY_BYTES: Final = 64
U64_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF

# Indices into the header seen as an array of u64.
MAGIC_AT: Final = 0
CAPACITY_AT: Final = 1
WRITE_POS_AT: Final = 1 * LINE_BYTES // 8
READ_POS_AT: Final = 2 * LINE_BYTES // 8
READER_TICKET_AT: Final = 3 * LINE_BYTES // 8
WRITER_TICKET_AT: Final = 4 * LINE_BYTES // 8

KIND_SKIP: Final = 0
MAX_KIND: Final = 0xFFFF_FFFF

#: stamp, length, kind: what the CRC covers besides the payload.
CHECKED: Final = struct.Struct("<QII")
#: The same and the CRC.
HEADER: Final = struct.Struct("<QIII")
HEADER_BYTES: Final = HEADER.size


def memory_bytes(capacity_bytes: int) -> int:
    """Size of the buffer for a ring of this capacity. Raises RingLayoutError for a bad capacity."""
    if capacity_bytes < MIN_CAPACITY_BYTES or capacity_bytes & (capacity_bytes - 1):
        raise RingLayoutError(
            f"ring capacity must be a power of two of at least {MIN_CAPACITY_BYTES} bytes, "
            f"got {capacity_bytes}"
        )
    return DATA_OFFSET + capacity_bytes


def record_bytes(payload_bytes: int) -> int:
    """Bytes one record takes, header and padding included."""
    return (payload_bytes + HEADER_BYTES + 7) & ~7


def check_memory(memory: memoryview) -> None:
    """Raises RingLayoutError unless the memory is writable and starts at a multiple of 8.

    An aligned u64 lies inside one cache line, where an 8-byte store is a single one; over a line's
    edge another core may see half of it.
    """
    if memory.readonly:
        raise RingLayoutError("a ring needs writable memory, got a read-only buffer")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if address % 8:
        raise RingLayoutError(f"a ring needs memory aligned to 8 bytes, got address {address:#x}")
