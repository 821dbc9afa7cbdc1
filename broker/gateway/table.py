"""All streams of the door by their job, and whose they are. Knows no messages."""

from __future__ import annotations

import time

from broker.gateway.sessions import Client
from broker.gateway.stream import Stream, StreamState
from broker.messages import Done, Failed


class StreamTable:
    """A stream stays for retain_ms after its end was sent, at most retain_jobs of them. One that
    waits for credit or room stays as long as its client; one whose client has come back stays for
    retain_ms from then on, however many others end. has_keys: clients are known by CURVE keys, so
    tenants are walls and not just labels.
    """

    def __init__(self, retain_ms: int, retain_jobs: int, has_keys: bool) -> None:
        self.has_keys = has_keys
        self._retain_s = retain_ms / 1000
        self._retain_jobs = retain_jobs
        self._streams: dict[str, Stream] = {}
        self._untold: dict[Stream, None] = {}  # ended, when last looked at not told
        self._told: dict[Stream, None] = {}  # in the order of their `kept_from_s`

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._streams) - len(self._untold) - len(self._told)

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
        self._untold[stream] = None
        stream.kept_from_s = time.monotonic()
        stream.client.waiting[stream.job] = stream

    def reopen(self, stream: Stream) -> None:
        """An ended stream is told from the start once more."""
        if stream.state is StreamState.ENDED:
            self._drop_ended(stream)
            stream.state = StreamState.LIVE
        stream.terminal = None
        stream.terminal_sent = False

    def forget(self, stream: Stream) -> None:
        """The job's id is free again."""
        if self.is_current(stream):
            self._remove(stream)

    def forget_old(self) -> None:
        """Drop ended jobs beyond their retention."""
        now_s = time.monotonic()
        due_s = now_s - self._retain_s
        for stream in list(self._untold):
            if stream.terminal_sent or stream.client.is_gone:
                del self._untold[stream]
                self._told[stream] = None
                stream.kept_from_s = now_s
            elif not stream.is_attached and max(stream.kept_from_s, stream.client.came_s) < due_s:
                self._remove(stream)  # its client did not ask for it again
        told = self._told
        while told:
            stream = next(iter(told))
            if not (stream.terminal_sent or stream.client.is_gone):
                del told[stream]
                self._untold[stream] = None  # it is being told once more
            elif len(told) > self._retain_jobs or stream.kept_from_s < due_s:
                self._remove(stream)
            else:
                break

    def _remove(self, stream: Stream) -> None:
        self._drop_ended(stream)
        del self._streams[stream.job]
        stream.client.streams.pop(stream.job, None)
        stream.client.waiting.pop(stream.job, None)

    def _drop_ended(self, stream: Stream) -> None:
        self._untold.pop(stream, None)
        self._told.pop(stream, None)
