"""Records that cross the two rings, as flat little-endian arrays.

Knows the byte layout of every record; knows nothing of rings, sockets or torch. The broker writes
`Submit`, `RidList` (abort, pause, resume) and `Shutdown` to the request ring; the engine writes
`Ready`, `Progress`, `StepEvents`, `Reject` and `Stats` to the token ring. Numbers travel as arrays
(structure of arrays), so a step of 256 rows is decoded with a handful of numpy views and no Python
object per token.

The records that come all the time are tuples: one is made in a third of a frozen dataclass's time.

A `rid` names one run of one job inside one engine incarnation: the broker counts it up and never
reuses it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.uint64]


class Kind(IntEnum):
    """Record kinds. 1-15 go broker -> engine, 16-31 engine -> broker."""

    SUBMIT = 1
    ABORT = 2
    PAUSE = 3
    RESUME = 4
    SHUTDOWN = 5
    READY = 16
    PROGRESS = 17
    STEP = 18
    REJECT = 19
    STATS = 20


class Finish(IntEnum):
    """Why a run ended; travels in the low bits of a step event's flags."""

    NOT_FINISHED = 0
    STOP = 1  # end-of-sequence or one of stop_token_ids
    LENGTH = 2  # max_tokens or the model's length reached
    ABORTED = 3  # the broker asked for it
    ERROR = 4  # non-finite logits or a fault confined to this row


class RecordError(ValueError):
    """A record's bytes do not match its layout: a bug on the other side, never user input."""


class Sampling(NamedTuple):
    """Numbers the sampler needs for one run. Ranges were checked before they came here.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off; the penalties'
    neutral values are repetition 1, presence 0 and frequency 0.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is other than neutral, so the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty
        )


class Submit(NamedTuple):
    """One run for the engine.

    prompt_ids: int32 [P], P >= 1. prefix_ids: int32 [O], output tokens of earlier attempts, which
    count against max_tokens and keep their positions. max_tokens >= len(prefix_ids) + 1 counts all
    output tokens.
    stop_token_ids: int32 [S], end-of-sequence ids included unless ignore_eos. cache_salt separates
    tenants in the prefix cache. solo: run alone in the batch (a suspect after a crash). priority:
    0 high, 1 normal, 2 low.
    """

    rid: int
    prompt_ids: IntArray
    prefix_ids: IntArray
    stop_token_ids: IntArray
    max_tokens: int
    min_tokens: int = 0
    sampling: Sampling = Sampling()
    priority: int = 1
    solo: bool = False
    cache_salt: int = 0


class StepEvents(NamedTuple):
    """What one engine step produced.

    rids uint64 [N], token_ids int32 [N] (-1: no token, only the end of a run), finish uint8 [N]
    (`Finish`): one entry a token, in order. started_rids uint64 [M], cached_tokens int32 [M]: runs
    whose prompt is done and how many prompt tokens the prefix cache gave. Then the load at the end
    of the step.
    """

    step_id: int
    time_ns: int  # CLOCK_MONOTONIC when the tokens were on the host
    rids: LongArray
    token_ids: IntArray
    finish: npt.NDArray[np.uint8]
    started_rids: LongArray
    cached_tokens: IntArray
    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0  # since start
    batch_tokens: int = 0  # computed in this step
    step_us: int = 0


@dataclass(frozen=True, slots=True)
class Reject:
    """A run the engine cannot take. code and field are wire words (`invalid`, `too_long`, ...)."""

    rid: int
    code: str
    field: str
    message: str


_SUBMIT = struct.Struct("<QQQiiffffffiiiiiI")
_STEP = struct.Struct("<QQIIIIIIIII")


def encode_submit(s: Submit) -> bytes:
    """`Submit` -> bytes."""
    p = s.sampling
    head = _SUBMIT.pack(
        s.rid,
        p.seed & 0xFFFF_FFFF_FFFF_FFFF,
        s.cache_salt & 0xFFFF_FFFF_FFFF_FFFF,
        s.max_tokens,
        s.min_tokens,
        p.temperature,
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
        p.top_k,
        s.priority,
        len(s.prompt_ids),
        len(s.prefix_ids),
        len(s.stop_token_ids),
        1 if s.solo else 0,
    )
    ids = (s.prompt_ids, s.prefix_ids, s.stop_token_ids)
    return b"".join((head, *[part.astype("<i4", copy=False).tobytes() for part in ids]))


def decode_submit(data: bytes) -> Submit:
    """bytes -> `Submit`. Raises RecordError if the length does not fit the counts."""
    if len(data) < _SUBMIT.size:
        raise RecordError(f"SUBMIT record has {len(data)} bytes, expected at least {_SUBMIT.size}")
    f = _SUBMIT.unpack_from(data)
    num_prompt, num_prefix, num_stop = f[13], f[14], f[15]
    ids = np.frombuffer(data, dtype="<i4", offset=_SUBMIT.size)
    if len(ids) != num_prompt + num_prefix + num_stop:
        raise RecordError(
            f"SUBMIT record carries {len(ids)} ids,"
            f" header says {num_prompt}+{num_prefix}+{num_stop}"
        )
    return Submit(
        rid=f[0],
        prompt_ids=ids[:num_prompt],
        prefix_ids=ids[num_prompt : num_prompt + num_prefix],
        stop_token_ids=ids[num_prompt + num_prefix :],
        max_tokens=f[3],
        min_tokens=f[4],
        sampling=Sampling(f[1], f[5], f[6], f[7], f[11], f[8], f[9], f[10]),
        priority=f[12],
        solo=bool(f[16]),
        cache_salt=f[2],
    )


def encode_rids(rids: list[int]) -> bytes:
    """Run ids of an ABORT, PAUSE or RESUME record -> bytes."""
    return np.asarray(rids, dtype="<u8").tobytes()


def decode_rids(data: bytes) -> list[int]:
    """bytes -> run ids."""
    return [int(r) for r in np.frombuffer(data, dtype="<u8")]


def encode_step(s: StepEvents) -> bytes:
    """`StepEvents` -> bytes."""
    head = _STEP.pack(
        s.step_id,
        s.time_ns,
        len(s.rids),
        len(s.started_rids),
        s.num_running,
        s.num_waiting,
        s.used_blocks,
        s.total_blocks,
        s.preemptions & 0xFFFF_FFFF,
        s.batch_tokens,
        min(s.step_us, 0xFFFF_FFFF),
    )
    parts = (
        head,
        b"\0" * 4,  # the 8-byte columns start aligned
        s.rids.astype("<u8", copy=False).tobytes(),
        s.started_rids.astype("<u8", copy=False).tobytes(),
        s.token_ids.astype("<i4", copy=False).tobytes(),
        s.cached_tokens.astype("<i4", copy=False).tobytes(),
        s.finish.astype("u1", copy=False).tobytes(),
    )
    return b"".join(parts)


def decode_step(data: bytes) -> StepEvents:
    """bytes -> `StepEvents` whose arrays are views of `data`. Raises RecordError on a wrong
    length."""
    if len(data) < _STEP.size + 4:
        raise RecordError(f"STEP record has {len(data)} bytes, expected at least {_STEP.size + 4}")
    f = _STEP.unpack_from(data)
    n, m = f[2], f[3]
    at = _STEP.size + 4
    if len(data) != at + 13 * n + 12 * m:
        raise RecordError(
            f"STEP record has {len(data)} bytes, expected {at + 13 * n + 12 * m} for n={n} m={m}"
        )
    rids = np.frombuffer(data, "<u8", n, at)
    started = np.frombuffer(data, "<u8", m, at + 8 * n)
    at += 8 * (n + m)
    token_ids = np.frombuffer(data, "<i4", n, at)
    cached = np.frombuffer(data, "<i4", m, at + 4 * n)
    finish = np.frombuffer(data, "u1", n, at + 4 * (n + m))
    return StepEvents(f[0], f[1], rids, token_ids, finish, started, cached, *f[4:])


def step_counts(data: bytes) -> tuple[int, int]:
    """Of a STEP record: runs that started, and runs that ended; without taking it apart."""
    _, _, n, m = _STEP.unpack_from(data)[:4]
    return m, n - data.count(b"\0", len(data) - n)


def encode_reject(r: Reject) -> bytes:
    """`Reject` -> bytes."""
    return encode_json({"rid": r.rid, "code": r.code, "field": r.field, "message": r.message})


def decode_reject(data: bytes) -> Reject:
    """bytes -> `Reject`."""
    d = decode_json(data)
    return Reject(rid=d["rid"], code=d["code"], field=d["field"], message=d["message"])


def encode_json(obj: dict[str, Any]) -> bytes:
    """Body of the rare records (READY, PROGRESS, STATS): one JSON object."""
    return json.dumps(obj, separators=(",", ":")).encode()


def decode_json(data: bytes) -> dict[str, Any]:
    """bytes -> the JSON object. Raises RecordError if it is not one."""
    obj = json.loads(data)
    if not isinstance(obj, dict):
        raise RecordError(f"expected a JSON object, got {type(obj).__name__}")
    return obj
