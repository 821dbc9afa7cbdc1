"""A wait-free byte ring between one writer and one reader, in memory that both can see.

Knows memory, order and checks; knows nothing of processes, sockets or what the records mean.
`layout` says where everything lies, `wake` how a sleeping side is woken.

**Order.** The writer fills in the record, then stores its counter; the reader loads the counter,
copies the record, checks the copy, then stores its own counter. On x86 neither stores nor loads
change places among themselves, so what the counter announces is there. Elsewhere the counter may
be seen first: then stamp or CRC do not match yet, and the reader says "nothing yet" and looks again
later, so a weaker order turns a race into a retry (untested on such a machine). A mismatch that
stays is `RingCorrupt`.

**Counters** are read and written as items of a `memoryview.cast("Q")`, which CPython copies as one
aligned 8-byte move. `struct.pack_into` would clear the bytes first, and the other side would see
the zero.

**Death.** A record is published by one store after it is complete, so a writer killed anywhere
leaves a ring that ends cleanly before the unfinished record. No call waits for the other side.
"""

from __future__ import annotations

from broker.ring.memory import Ring, WritableBuffer
from broker.ring.reader import RingReader
from broker.ring.writer import RingWriter

__all__ = ["Ring", "RingReader", "RingWriter", "WritableBuffer"]
