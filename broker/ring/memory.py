"""The memory of one ring: who creates it, who attaches to it, and how it is let go."""

from __future__ import annotations

import mmap

from broker.ring import layout
from broker.ring.errors import RingLayoutError

WritableBuffer = bytearray | memoryview | mmap.mmap


class Ring:
    """The memory of one ring: its counters and its data. Make it with `create` or `attach`."""

    __slots__ = ("capacity_bytes", "counters", "data")

    def __init__(self, memory: memoryview, capacity_bytes: int) -> None:
        """Use `create` or `attach`. `memory` is writable, aligned and of the right size."""
        data_end = layout.DATA_OFFSET + capacity_bytes
        self.capacity_bytes = capacity_bytes
        self.counters = memory[: layout.DATA_OFFSET].cast("Q")
        self.data = memory[layout.DATA_OFFSET : data_end]

    @classmethod
    def create(cls, buffer: WritableBuffer, start: int = 0) -> Ring:
        """Lay an empty ring into the buffer, before the other side attaches.

        Args:
            buffer: exactly `layout.memory_bytes(capacity)` bytes, writable, aligned to 8.
            start: first position, a multiple of 8 below 2^64; tests set it just before the wrap.
        Raises RingLayoutError.
        """
        with memoryview(buffer).cast("B") as memory:
            capacity_bytes = memory.nbytes - layout.DATA_OFFSET
            layout.memory_bytes(capacity_bytes)
            layout.check_memory(memory)
            if start % 8 or not 0 <= start <= layout.U64_MASK:
                raise RingLayoutError(f"start must be a multiple of 8 below 2^64, got {start}")
            ring = cls(memory, capacity_bytes)
        counters = ring.counters
        for at in range(len(counters)):
            counters[at] = 0
        counters[layout.CAPACITY_AT] = capacity_bytes
        counters[layout.WRITE_POS_AT] = start
        counters[layout.READ_POS_AT] = start
        counters[layout.MAGIC_AT] = layout.MAGIC
        return ring

    @classmethod
    def attach(cls, buffer: WritableBuffer) -> Ring:
        """Open a ring that the other side created in this memory. Raises RingLayoutError."""
        with memoryview(buffer).cast("B") as memory:
            capacity_bytes = memory.nbytes - layout.DATA_OFFSET
            layout.memory_bytes(capacity_bytes)
            layout.check_memory(memory)
            ring = cls(memory, capacity_bytes)
        magic = ring.counters[layout.MAGIC_AT]
        stated_bytes = ring.counters[layout.CAPACITY_AT]
        if magic != layout.MAGIC or stated_bytes != capacity_bytes:
            ring.release()
            raise RingLayoutError(
                f"no ring of this layout: magic {magic:#x} (expected {layout.MAGIC:#x}), "
                f"capacity {stated_bytes} bytes in a buffer for {capacity_bytes}"
            )
        return ring

    def release(self) -> None:
        """Let go of the buffer, so that an mmap below can be closed. Later use is a ValueError."""
        self.counters.release()
        self.data.release()
