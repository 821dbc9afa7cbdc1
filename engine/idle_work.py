"""What a runner can do ahead in idle moments: compile, capture graphs."""

from __future__ import annotations

import time

import structlog

from engine.plan import Runner

log = structlog.get_logger()


class IdleWork:
    """Does it piece by piece, and says in the log when all of it is done, each time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pieces = 0
        self._seconds = 0.0

    def do_piece(self) -> bool:
        """One piece, so that a request waits for one at most; False if none is left."""
        began = time.monotonic()
        if self._runner.prepare():
            self._pieces += 1
            self._seconds += time.monotonic() - began
            return True
        if self._pieces:
            log.info("engine.prepared", pieces=self._pieces, seconds=round(self._seconds, 2))
            self._pieces, self._seconds = 0, 0.0
        return False
