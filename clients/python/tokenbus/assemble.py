"""One job's events -> tokens in order, each once. Pure state, no I/O: the same on both doors.

Section 6 of docs/PROTOCOL.md as code: drop repeats, notice holes, check the crc.
"""

from __future__ import annotations

from enum import Enum

from tokenbus.errors import ProtocolError
from tokenbus.events import Done, Tokens, crc32_of_ids


class Verdict(Enum):
    """What `take` says of an event."""

    NEW = "new"  # next in order; hand it out
    REPEAT = "repeat"  # seen before; drop it
    HOLE = "hole"  # tokens are missing before it; drop it and ask from `last` on


class Assembler:
    """Position and checksum of one job.

    after: seq that the reader starts behind. With after > 0 the ids before it are unknown, so the
    crc cannot be checked; `have` gives them and makes up for it.
    """

    def __init__(self, after: int = 0, have: tuple[int, ...] = ()) -> None:
        self.last = max(after, len(have))
        self._checks_crc = len(have) == self.last
        self.ids: list[int] = list(have)
        self._crc = crc32_of_ids(have)
        self._is_fresh = True

    def take(self, event: Tokens) -> Verdict:
        """Account for a tokens event, if it is the next one.

        The first event may start before `after`: a text cannot be split between its tokens.
        """
        if event.last_seq <= self.last:
            return Verdict.REPEAT
        if event.seq > self.last + 1 or (event.seq <= self.last and not self._is_fresh):
            return Verdict.HOLE
        self._is_fresh = False
        self.last = event.last_seq
        self.ids.extend(event.ids)
        self._crc = crc32_of_ids(event.ids, self._crc)
        return Verdict.NEW

    def finish(self, done: Done) -> Verdict:
        """Check the end: NEW, or HOLE if tokens before it are missing. Raises ProtocolError on a
        wrong crc.
        """
        if done.seq > self.last:
            return Verdict.HOLE
        if done.seq < self.last:
            message = f"job {done.job} ended at seq {done.seq}, but {self.last} tokens came"
            raise ProtocolError(message, field="seq")
        if self._checks_crc and done.crc != self._crc:
            message = f"job {done.job}: crc of {self.last} tokens is {self._crc}, told {done.crc}"
            raise ProtocolError(message, field="crc")
        return Verdict.NEW
