"""All streams of the door by their job, and whose they are. Knows no messages."""

from __future__ import annotations

import time
from collections import deque

from broker.gateway.sessions import Client
from broker.gateway.stream import Stream, StreamState
from broker.messages import Done, Failed


class StreamTable:
    """Ended streams stay for retain_ms, at most retain_jobs of them. has_keys: clients are known by
    CURVE keys, so tenants are walls and not just labels.
    """

    def __init__(self, retain_ms: int, retain_jobs: int, has_keys: bool) -> None:
        self.has_keys = has_keys
        self._retain_s = retain_ms / 1000
        self._retain_jobs = retain_jobs
        self._streams: dict[str, Stream] = {}
        self._ended: deque[Stream] = deque()

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._streams) - len(self._ended)

    def get(self, job: str) -> Stream | None:
        """The stream of a job, whosever it is."""
        return self._streams.get(job)

    def visible(self, client: Client, job: str) -> Stream | None:
        """The stream of a job, if this client may know of it."""
        stream = self._streams.get(job)
        if stream is None or stream.client is client or self.may_see(client, stream.tenant):
            return stream
        return None

    def may_see(self, client: Client, tenant: str) -> bool:
        """Whether this client may know of another's job of that tenant."""
        return not self.has_keys or client.tenant == tenant

    def pass_on(self, stream: Stream, heir: Client) -> None:
        """The client that has the stream is gone, or gives it up."""
        old = stream.client
        self.attach(stream, heir)
        stream.others.pop(old, None)

    def is_current(self, stream: Stream) -> bool:
        """Whether the stream stands for its job (still)."""
        return self._streams.get(stream.job) is stream

    def add(self, stream: Stream) -> None:
        """A new job."""
        self._streams[stream.job] = stream
        stream.client.streams[stream.job] = stream

    def attach(self, stream: Stream, client: Client) -> None:
        """This client's session gets the stream from now on. Who had it until now is among the
        others, unless there is nothing left to hear.
        """
        old = stream.client
        stream.others.pop(client, None)
        if old is not client:
            if not stream.terminal_sent:
                stream.others[old] = None
            old.streams.pop(stream.job, None)
            old.waiting.pop(stream.job, None)
            stream.client = client
            client.streams[stream.job] = stream
        stream.is_attached = True
        client.waiting[stream.job] = stream

    def end(self, stream: Stream, event: Done | Failed) -> None:
        """The job's one terminal event came."""
        stream.end(event)
        self._ended.append(stream)
        stream.client.waiting[stream.job] = stream

    def reopen(self, stream: Stream) -> None:
        """An ended stream is told from the start once more."""
        if stream.state is StreamState.ENDED:
            self._ended.remove(stream)
            stream.state = StreamState.LIVE
        stream.terminal = None
        stream.terminal_sent = False

    def forget(self, stream: Stream) -> None:
        """The job's id is free again."""
        if stream.state is StreamState.ENDED and self.is_current(stream):
            self._ended.remove(stream)
        self._remove(stream)

    def forget_old(self) -> None:
        """Drop ended jobs beyond their retention."""
        keep_from_s = time.monotonic() - self._retain_s
        ended = self._ended
        while ended and (len(ended) > self._retain_jobs or ended[0].ended_s < keep_from_s):
            self._remove(ended.popleft())

    def _remove(self, stream: Stream) -> None:
        if self.is_current(stream):
            del self._streams[stream.job]
            stream.client.streams.pop(stream.job, None)
            stream.client.waiting.pop(stream.job, None)
