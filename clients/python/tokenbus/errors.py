"""Errors a job can end in, and errors a client can raise: one tree, one class a failure, each with
its wire code.

The code travels on both doors (`ERROR`/`REJECTED` on ZeroMQ, `event=error` on Redis); `from_wire`
turns it back into the same class on the client's side.
"""

from __future__ import annotations

from typing import ClassVar


class TokenbusError(Exception):
    """Base of everything tokenbus raises on purpose.

    code: the wire word. retry: whether the same job may succeed later. field: the request field at
    fault, or "". retry_ms: how long to wait first, where the worker can say.
    """

    code: ClassVar[str] = "internal"
    retry: bool = False

    def __init__(self, message: str, *, field: str = "", retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_ms = retry_ms


class InvalidField(TokenbusError):
    """A request field has the wrong type or is out of range; `field` is its path, such as
    `messages[2].role`.
    """

    code = "invalid"


class BadFrame(TokenbusError):
    """A ZeroMQ message is not in the protocol: frame count, magic, type byte or msgpack body."""

    code = "bad_frame"


class NoSession(TokenbusError):
    """A message came before HELLO on this connection: the worker is new, or the connection is.

    Say HELLO, then RESUME or SUBMIT again.
    """

    code = "no_session"
    retry = True


class VersionMismatch(TokenbusError):
    """The peer speaks another major version."""

    code = "version"


class Unsupported(TokenbusError):
    """A known feature or field that this worker cannot honour; never silently ignored."""

    code = "unsupported"


class TooLarge(TokenbusError):
    """A message or field is over its size limit."""

    code = "too_large"


class TooLong(TokenbusError):
    """Prompt (plus output) does not fit the model's length or the KV cache."""

    code = "too_long"


class UnknownModel(TokenbusError):
    """The job names a model that this worker does not serve."""

    code = "unknown_model"


class UnknownQueue(TokenbusError):
    """The job names a queue that this worker does not serve."""

    code = "unknown_queue"


class UnknownJob(TokenbusError):
    """CANCEL, RESUME, status or tail of a job nobody knows."""

    code = "not_found"


class Conflict(TokenbusError):
    """The job id is taken by a different request."""

    code = "conflict"


class Gone(TokenbusError):
    """RESUME from a position that is no longer, or not yet, in the log."""

    code = "gone"


class Busy(TokenbusError):
    """The queue is full; try again after retry_ms."""

    code = "busy"
    retry = True


class Draining(TokenbusError):
    """The worker takes no new jobs; another may."""

    code = "draining"
    retry = True


class EngineLost(TokenbusError):
    """The engine died and could not be brought back."""

    code = "engine_lost"
    retry = True


class Poisoned(TokenbusError):
    """The job killed the engine too often; it is in the dead stream."""

    code = "poisoned"


class NonFinite(TokenbusError):
    """The model produced non-finite logits for this job."""

    code = "non_finite"


class BusUnavailable(TokenbusError):
    """Redis or the worker cannot be reached."""

    code = "unavailable"
    retry = True


class ProtocolError(TokenbusError):
    """The stream broke its own promise: a hole in the sequence or a wrong CRC."""

    code = "protocol"


class Internal(TokenbusError):
    """A fault of ours, confined to this job."""

    code = "internal"


_ALL: tuple[type[TokenbusError], ...] = (
    InvalidField, BadFrame, NoSession, VersionMismatch, Unsupported, TooLarge, TooLong,
    UnknownModel, UnknownQueue, UnknownJob, Conflict, Gone, Busy, Draining, EngineLost,
    Poisoned, NonFinite, BusUnavailable, ProtocolError, Internal,
)  # fmt: skip
_CLASSES: dict[str, type[TokenbusError]] = {cls.code: cls for cls in _ALL}


def from_wire(
    code: str,
    message: str,
    *,
    field: str = "",
    retry: bool | None = None,
    retry_ms: int | None = None,
) -> TokenbusError:
    """The exception for a wire code. An unknown code becomes `Internal` with the code in its
    message.

    retry: what the peer said, where it said so; it wins over the class's own.
    """
    cls = _CLASSES.get(code)
    if cls is None:
        error: TokenbusError = Internal(f"{code}: {message}", field=field, retry_ms=retry_ms)
    else:
        error = cls(message, field=field, retry_ms=retry_ms)
    if retry is not None:
        error.retry = retry
    return error
