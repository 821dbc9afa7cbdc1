"""One job on a ZeroMQ connection: which message to send when, so that no token is missed.

new --submit--> submitted --ACCEPTED--> running --DONE, ERROR--> over
                    ^                     | hole, new connection: RESUME
                    +--- new worker, or --+
                         it forgot the job

A job that waits in the queue, or whose prompt is being read, has nothing to send: silence after a
RESUME is no fault. RESUME is repeated where a hole is known, and at last given up, and where the
worker said that it is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenbus.assemble import Verdict
from tokenbus.bodies import Accepted, Resume
from tokenbus.errors import Conflict, EngineLost, ProtocolError, TokenbusError
from tokenbus.events import Done, Started, Tokens
from tokenbus.parse import build_submit
from tokenbus.protocol import MessageType
from tokenbus.request import JobRequest
from tokenbus.stream import Job

Send = Callable[[MessageType, dict[str, object], list[bytes]], None]

RESUME_AGAIN_S = 1.0
MAX_RESUMES = 5  # without a new token in between


class ZmqJob:
    """Follows one job for one reader. `send` drops messages while there is no session."""

    def __init__(self, job: Job, send: Send) -> None:
        self.job = job
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._seed: int | None = None  # the one in use, told by ACCEPTED
        self._has_hole = False  # something came that does not follow the last token
        self._is_resuming = False
        self._is_asked = False  # SUBMIT was sent, or is to be sent, and not answered yet
        self._was_unknown = False  # since the last WELCOME
        self._asks_again: asyncio.TimerHandle | None = None  # the worker was too busy for RESUME
        self._num_resumes = 0  # since the hole is known
        self._resumed_s = 0.0

    @property
    def is_asked(self) -> bool:
        """SUBMIT has no answer yet from the worker that is there now."""
        return self._is_asked

    @property
    def is_resuming(self) -> bool:
        """RESUME was sent and nothing new came since."""
        return self._is_resuming

    def submit(self) -> None:
        """Send the job, with what the reader already holds. Raises TooLarge over the worker's
        limits.
        """
        request = self.job.request
        assert request is not None, f"job {self.job.name} was not opened here"
        self._is_asked = True
        body, blobs = build_submit(self._continued(request))
        self._send(MessageType.SUBMIT, body, blobs)

    def resume(self) -> None:
        """Ask for everything after the last token; at most once a second."""
        now_s = self._loop.time()
        if self._is_resuming and now_s - self._resumed_s < RESUME_AGAIN_S:
            return
        if self._num_resumes >= MAX_RESUMES:
            last = self.job.assembler.last
            message = f"job {self.job.name}: the worker does not resend what follows seq {last}"
            self.job.fail(ProtocolError(message, field="seq"))
            return
        self._num_resumes += self._has_hole
        self._is_resuming = True
        self._resumed_s = now_s
        self._drop_timer()
        body = Resume(self.job.name, self.job.assembler.last).to_body()
        self._send(MessageType.RESUME, body, [])

    def pick_up(self, is_same_worker: bool) -> None:
        """After a WELCOME: go on where the last connection ended."""
        self._forget_hole()
        self._was_unknown = False
        request = self.job.request
        is_known = is_same_worker or (request is not None and request.durable)
        if request is None or (is_known and not self._is_asked):
            self.resume()
        else:
            self._submit_again()

    def has_same_content(self, other: ZmqJob) -> bool:
        """Whether a worker takes both requests for one job."""
        mine, others = self.job.request, other.job.request
        return mine is others or (
            mine is not None and others is not None and _is_same(mine, others)
        )

    def on_accepted(self, accepted: Accepted, worker: str) -> None:
        """The worker has the job."""
        self._is_asked = False
        self._seed = accepted.seed
        name, attempt = accepted.job, accepted.attempt
        self.job.on_started(Started(name, attempt, worker, accepted.seed, accepted.prompt_tokens))

    def on_rejected(self, error: TokenbusError) -> None:
        """The worker does not take the job, or not what is left of it."""
        self._is_asked = False
        if error.field.startswith("have"):
            error = EngineLost("the worker was restarted and cannot continue the job")
        self.job.fail(error)

    def on_busy(self, retry_ms: int | None) -> None:
        """RESUME came too early, such as before the worker had its Redis: ask again when it says,
        for as long as it answers. It may also be the answer to somebody's CANCEL or STATS.
        """
        if not self._is_resuming:
            return
        self._num_resumes = 0
        self._drop_timer()
        delay_s = RESUME_AGAIN_S if retry_ms is None else retry_ms / 1_000
        self._asks_again = self._loop.call_later(delay_s, self._ask_again)

    def on_unknown(self, error: TokenbusError, is_unwanted: bool) -> None:
        """The worker has forgotten the job. is_unwanted: somebody wants it cancelled."""
        request = self.job.request
        if self._is_asked:
            return  # it did not know the job before it read SUBMIT
        can_go_on = request is not None and not request.durable and not is_unwanted
        if self._is_resuming and can_go_on and not self._was_unknown:
            self._was_unknown = True
            self._forget_hole()
            self._submit_again()
        else:
            self.job.fail(error)

    def on_tokens(self, event: Tokens) -> None:
        """Hand out new tokens; ask for missing ones."""
        verdict = self.job.on_tokens(event)
        if verdict is Verdict.NEW:
            self._forget_hole()
        elif verdict is Verdict.HOLE:
            self._on_hole()

    def on_done(self, done: Done) -> None:
        """The end, or a sign that tokens before it are missing."""
        if self.job.on_done(done) is Verdict.HOLE:
            self._on_hole()

    def on_tick(self) -> None:
        """Ask again for the tokens that a RESUME did not bring."""
        if self._has_hole and self._asks_again is None:
            self.resume()

    def close(self) -> None:
        """Nobody reads the job any more."""
        self._drop_timer()

    def _ask_again(self) -> None:
        self._asks_again = None
        if not self.job.is_over:
            self._is_resuming = False
            self.resume()

    def _submit_again(self) -> None:
        try:
            self.submit()
        except TokenbusError as error:  # this worker's limits are lower
            self.job.fail(error)

    def _drop_timer(self) -> None:
        if self._asks_again is not None:
            self._asks_again.cancel()
            self._asks_again = None

    def _on_hole(self) -> None:
        self._has_hole = True
        self.resume()

    def _forget_hole(self) -> None:
        self._has_hole = self._is_resuming = False
        self._num_resumes = 0
        self._drop_timer()

    def _continued(self, request: JobRequest) -> JobRequest:
        """The request for a worker that never saw the job: with its seed, its tokens and the time
        that is left.
        """
        if request.deadline_ms is not None:
            gone_ms = int((self._loop.time() - self._opened_s) * 1_000)
            request = replace(request, deadline_ms=max(request.deadline_ms - gone_ms, 1))
        if self._seed is None:
            return request
        params = replace(request.params, seed=self._seed)
        return replace(request, params=params, have=tuple(self.job.assembler.ids))


def _is_same(one: JobRequest, other: JobRequest) -> bool:
    """By what workers compare: all but `have` and `deadline_ms`."""
    return replace(one, have=(), deadline_ms=None) == replace(other, have=(), deadline_ms=None)


def accept(row: Sequence[ZmqJob], accepted: Accepted, worker: str) -> None:
    """ACCEPTED, to the readers of a job: for the SUBMIT that came first, and those with the same
    content.
    """
    first = next((follower for follower in row if follower.is_asked), None)
    for follower in row:
        if first is None or not follower.is_asked or follower.has_same_content(first):
            follower.on_accepted(accepted, worker)


def reject(row: Sequence[ZmqJob], error: TokenbusError) -> None:
    """REJECTED, to the readers of a job: for one SUBMIT without an answer, or a RESUME of a durable
    job that no worker took. What runs already goes on.
    """
    asked = [follower for follower in row if follower.is_asked]
    concerned = [follower for follower in row if follower.is_resuming]
    if asked:
        # In conflict is what came later, if there is something else before it.
        is_conflict = isinstance(error, Conflict)
        refused = asked[-1 if is_conflict else 0]
        tails = [] if is_conflict else [one for one in concerned if one.job.request is None]
        concerned = [one for one in asked if one.has_same_content(refused)] + tails
    for follower in concerned:
        follower.on_rejected(error)
