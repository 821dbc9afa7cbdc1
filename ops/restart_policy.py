"""When a crashed process is started again, and when it is given up. Knows times, no processes."""

from __future__ import annotations

from collections import deque

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.2, 10.0
CRASH_WINDOW_S = 60.0
# A process that never got ready between its crashes will not get ready by the next one.
MAX_CRASHES_UNREADY = 3
# One that did is killed from outside, by its jobs or by hand: each job that kills engines costs at
# most a few crashes before it is put aside, and several may come in a minute.
MAX_CRASHES_READY = 20


class CrashRecord:
    """The crashes of one process."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()  # monotonic, within the window
        self._num_unready = 0  # in a row

    def add(self, now_s: float, *, was_ready: bool) -> None:
        """One more crash; was_ready: the process had done its work since its last start."""
        self._times.append(now_s)
        while now_s - self._times[0] > CRASH_WINDOW_S:
            self._times.popleft()
        self._num_unready = 0 if was_ready else self._num_unready + 1

    @property
    def num_recent(self) -> int:
        """Crashes within the window."""
        return len(self._times)

    @property
    def is_hopeless(self) -> bool:
        """Whether another start would be in vain."""
        return self._num_unready >= MAX_CRASHES_UNREADY or self.num_recent >= MAX_CRASHES_READY

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next start: doubles with each crash in the window."""
        return min(BACKOFF_FIRST_S * 2.0 ** max(self.num_recent - 1, 0), BACKOFF_LAST_S)
