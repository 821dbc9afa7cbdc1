"""What happens to a job, as values: the same on both doors. And the checksum over its tokens.

A job's life as a reader sees it: `Started` (again for every new attempt), `Tokens` with seqs 1, 2,
3 ... without holes, then exactly one `Done` or `Failed`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from tokenbus.errors import BadFrame, TokenbusError
from tokenbus.fields import pack_ids

Reason = Literal["stop", "length", "cancelled", "deadline"]
REASONS: tuple[Reason, ...] = ("stop", "length", "cancelled", "deadline")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and durations of a finished job, in tokens and milliseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


USAGE_FIELDS = tuple(field.name for field in fields(Usage))
_values_of = attrgetter(*USAGE_FIELDS)


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs the job. seed: the one in use, fixed for the job's life."""

    job: str
    attempt: int
    worker: str
    seed: int
    prompt_tokens: int


class Tokens(NamedTuple):
    """Output tokens of one job, in order. (A tuple: there are hundreds of thousands a second.)

    seq: of the first id; the last one's is seq + len(ids) - 1. text: what these ids add, valid
    UTF-8; it may be empty while a character or a possible stop string is incomplete.
    """

    job: str
    attempt: int
    seq: int
    ids: tuple[int, ...]
    text: str

    @property
    def last_seq(self) -> int:
        """Seq of the last id."""
        return self.seq + len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Done:
    """The job's end. seq: of its last token (0 if none). text: held back until now, to be appended.

    crc: CRC-32 over all output ids as little-endian int32 (see `crc32_of_ids`).
    """

    job: str
    attempt: int
    seq: int
    reason: Reason
    text: str
    usage: Usage
    crc: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The job's end by error. seq as in `Done`."""

    job: str
    attempt: int
    seq: int
    error: TokenbusError


Event = Started | Tokens | Done | Failed


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Where a job stands. state: queued, running, done or failed; seq: of its last token; reason
    when done, code when failed.
    """

    job: str
    state: str
    attempt: int = 0
    seq: int = 0
    worker: str = ""
    reason: str = ""
    code: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job has its end."""
        return self.state in ("done", "failed")


def crc32_of_ids(ids: Iterable[int], crc: int = 0) -> int:
    """CRC-32 (zlib, IEEE) of ids as little-endian int32. `crc`: of the ids before these."""
    return zlib.crc32(pack_ids(tuple(ids)), crc)


def usage_to_map(usage: Usage) -> dict[str, Any]:
    """`Usage` as the wire has it."""
    return dict(zip(USAGE_FIELDS, _values_of(usage), strict=True))


def usage_from_map(values: object) -> Usage:
    """Inverse of `usage_to_map`; missing counts are 0. Raises BadFrame."""
    if not isinstance(values, Mapping):
        raise BadFrame("usage is not a map")
    known: dict[str, Any] = {}
    for name in USAGE_FIELDS:
        value = values.get(name, 0)
        if type(value) is not int and type(value) is not float:
            raise BadFrame(f"usage.{name} is not a number")
        known[name] = float(value) if name.endswith("_ms") else int(value)
    return Usage(**known)


def read_reason(value: object) -> Reason:
    """A reason word. Raises BadFrame."""
    for reason in REASONS:
        if value == reason:
            return reason
    raise BadFrame(f"reason {value!r} is not one of {', '.join(REASONS)}")
