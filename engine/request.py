"""What the scheduler keeps of a run that has no row, and the queue such runs wait in."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from broker.ring.records import Reject, Sampling, Submit
from engine.plan import RunnerInfo

IntArray = npt.NDArray[np.int32]

NUM_PRIORITIES = 3
ARRIVAL_BITS = 48


@dataclass(frozen=True, slots=True)
class Request:
    """One run without a row.

    token_ids: int32 [L], prompt and the output known so far. limit_tokens: length at which the run
    ends. min_position: stop ids may not be sampled below it. order: (priority, arrival) as one
    number, smaller goes first. is_started: its prompt was computed once before (a run that lost its
    row), with cached_tokens from the cache.
    """

    rid: int
    token_ids: IntArray
    num_prompt_tokens: int
    limit_tokens: int
    min_position: int
    stop_token_ids: IntArray
    sampling: Sampling
    order: int
    is_solo: bool
    cache_salt: int
    is_started: bool = False


def max_tokens_in_cache(info: RunnerInfo) -> int:
    """Longest run, prompt and output, that the model and the whole KV cache can hold."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def accept(submit: Submit, info: RunnerInfo, arrival: int) -> Request | Reject:
    """Check a run against the model and the cache.

    max_tokens beyond what model and cache hold is cut (the run ends with `Finish.LENGTH`); a prompt
    that leaves no room for one token is rejected. The arrays are copied, so the record's memory is
    not kept alive.
    """
    problem = _find_problem(submit, info)
    if problem is not None:
        return problem
    token_ids = np.concatenate([submit.prompt_ids, submit.prefix_ids]).astype(np.int32, copy=False)
    num_prompt = len(submit.prompt_ids)
    return Request(
        rid=submit.rid,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        limit_tokens=min(num_prompt + submit.max_tokens, max_tokens_in_cache(info)),
        min_position=num_prompt + submit.min_tokens,
        stop_token_ids=np.array(submit.stop_token_ids, dtype=np.int32),
        sampling=submit.sampling,
        order=submit.priority << ARRIVAL_BITS | arrival,
        is_solo=submit.solo,
        cache_salt=submit.cache_salt,
    )


def _find_problem(s: Submit, info: RunnerInfo) -> Reject | None:
    """The first thing that makes a run impossible, worded for its sender."""

    def reject(code: str, field: str, message: str) -> Reject:
        return Reject(s.rid, code, field, message)

    if len(s.prompt_ids) == 0:
        return reject("invalid", "prompt_ids", "prompt_ids is empty: send at least one token")
    foreign = _find_foreign_id(s, info.vocab_size)
    if foreign is not None:
        return foreign
    room = max_tokens_in_cache(info)
    num_tokens = len(s.prompt_ids) + len(s.prefix_ids)
    if num_tokens >= room:
        what = "model" if room == info.max_model_len else "KV cache"
        return reject(
            "too_long",
            "prompt_ids",
            f"{num_tokens} tokens leave no room for output: the {what} holds {room} in all",
        )
    if s.max_tokens <= len(s.prefix_ids):
        return reject(
            "invalid",
            "max_tokens",
            f"max_tokens is {s.max_tokens}: expected at least {len(s.prefix_ids) + 1}",
        )
    if s.min_tokens < 0:
        return reject("invalid", "min_tokens", f"min_tokens is {s.min_tokens}: expected 0 or more")
    if s.min_tokens and len(s.stop_token_ids) > info.max_held_stop_ids:
        return reject(
            "unsupported",
            "min_tokens",
            f"min_tokens with {len(s.stop_token_ids)} stop token ids: this model's runner holds"
            f" back at most {info.max_held_stop_ids}, end-of-sequence ids included",
        )
    if not 0 <= s.priority < NUM_PRIORITIES:
        return reject("invalid", "priority", f"priority is {s.priority}: expected 0, 1 or 2")
    return _find_sampling_problem(s.rid, s.sampling)


def _find_foreign_id(s: Submit, vocab_size: int) -> Reject | None:
    """The first token id that the model does not have."""
    for field, ids in (
        ("prompt_ids", s.prompt_ids),
        ("prefix_ids", s.prefix_ids),
        ("stop_token_ids", s.stop_token_ids),
    ):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            message = f"{field} holds {worst}: token ids are 0 to {vocab_size - 1} in this model"
            return Reject(s.rid, "invalid", field, message)
    return None


def _find_sampling_problem(rid: int, p: Sampling) -> Reject | None:
    checks = (
        ("temperature", p.temperature, p.temperature >= 0, "0 or more"),
        ("top_p", p.top_p, 0 <= p.top_p <= 1, "0 to 1"),
        ("min_p", p.min_p, 0 <= p.min_p <= 1, "0 to 1"),
        ("top_k", p.top_k, p.top_k >= 0, "0 or more"),
        ("repetition_penalty", p.repetition_penalty, p.repetition_penalty > 0, "above 0"),
        ("presence_penalty", p.presence_penalty, True, "a finite number"),
        ("frequency_penalty", p.frequency_penalty, True, "a finite number"),
    )
    for field, value, is_in_range, expected in checks:
        if not is_in_range or not math.isfinite(value):
            return Reject(rid, "invalid", field, f"{field} is {value}: expected {expected}")
    return None


class WaitingQueue:
    """Runs without a row, first by priority, then by arrival; any of them can leave or be held
    at any time.
    """

    def __init__(self) -> None:
        self._heap: list[
            tuple[int, int]
        ] = []  # (order, rid); an entry whose run has left is skipped
        self._ready: dict[int, Request] = {}
        self._held: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._held)

    def __contains__(self, rid: int) -> bool:
        return rid in self._ready or rid in self._held

    def push(self, request: Request, is_held: bool = False) -> None:
        """Add a run at the place its `order` gives it; a held one is not offered until `resume`."""
        if is_held:
            self._held[request.rid] = request
            return
        self._ready[request.rid] = request
        heapq.heappush(self._heap, (request.order, request.rid))

    def peek(self) -> Request | None:
        """The run that goes next, or None."""
        while self._heap:
            order, rid = self._heap[0]
            request = self._ready.get(rid)
            if request is not None and request.order == order:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the run that `peek` shows."""
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._ready[request.rid]
        return request

    def remove(self, rid: int) -> Request | None:
        """Take a run out wherever it is; None if it is not here."""
        request = self._held.pop(rid, None) or self._ready.pop(rid, None)
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = [(r.order, r.rid) for r in self._ready.values()]
            heapq.heapify(self._heap)
        return request

    def hold(self, rid: int) -> None:
        """Keep a run where it is but do not offer it."""
        request = self._ready.pop(rid, None)
        if request is not None:
            self._held[rid] = request

    def resume(self, rid: int) -> None:
        """Offer a held run again, at its old place."""
        request = self._held.pop(rid, None)
        if request is not None:
            self.push(request)

    def clear(self) -> None:
        """Drop everything."""
        self._heap.clear()
        self._ready.clear()
        self._held.clear()


def without_row(request: Request, token_ids: IntArray, is_started: bool) -> Request:
    """The same run with the output it has so far, to wait for a row again."""
    return replace(request, token_ids=token_ids, is_started=is_started)
