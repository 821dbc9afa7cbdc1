"""What a step's new rows take to the device: one packet in pinned memory, copied in one piece.

A packet is laid out as kernels/new_rows.py reads it: headers, then what penalties are counted by,
then token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import PlanError
from engine.gpu.memory import StepLimits
from engine.gpu.staging import IntArray, PinnedRing, aligned
from engine.plan import NewRow
from kernels.new_rows import HEADER_INTS
from kernels.sampling_tables import MAX_STOP_IDS

_HEADER = np.dtype(
    [
        ("row", "<i4"),
        ("num_tokens", "<i4"),
        ("ids_at", "<i4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
        ("seed", "<u8"),
        ("min_position", "<i4"),
        ("stop_ids", "<i4", MAX_STOP_IDS),
    ]
)
"""One header, without gaps: HEADER_INTS int32."""
_RUN_FIELDS = 3
_MAX_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SentRows:
    """A packet on the device, there until the next one is sent.

    packet int32 [capacity], begins with num_rows headers. max_tokens: ids of the longest row.
    runs int32 [3, P], for `count_new_rows`: those of the rows that are to be counted.
    """

    packet: torch.Tensor
    num_rows: int
    max_tokens: int
    runs: torch.Tensor


class NewRowUpload:
    """Packs new rows into pinned memory that is allocated once, and copies what is used of it.

    At most two steps are in flight, and a step takes one buffer of the ring.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._max_rows = limits.max_num_seqs
        self._max_len = limits.max_model_len + 1
        self._max_ids = max(limits.max_num_batched_tokens, self._max_len)
        headers = aligned(self._max_rows * HEADER_INTS)
        capacity = headers + aligned(_RUN_FIELDS * self._max_rows) + self._max_ids
        self._host = PinnedRing(capacity)
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def send(self, new_rows: Sequence[NewRow], counted: Collection[int]) -> Iterator[SentRows]:
        """Copy the rows to the device, asynchronously, mostly in one packet; `runs` are of the
        rows in `counted`. Launch what reads a packet before the next is asked for: it overwrites
        the last in stream order. Raises PlanError where a row has more ids than the token table.
        """
        for new in new_rows:
            if len(new.token_ids) > self._max_len:
                raise PlanError(f"row {new.row} got {len(new.token_ids)} of {self._max_len} ids")
        for index, rows in enumerate(self._split(new_rows)):
            is_counted = [new for new in rows if new.row in counted]
            runs_at = aligned(len(rows) * HEADER_INTS)
            # At 16 bytes: no kernel is compiled for odd pointers.
            ids_at = runs_at + aligned(_RUN_FIELDS * len(is_counted))
            num_ints = ids_at + sum(len(new.token_ids) for new in rows)
            # A step's other packets (prefixes that were cached cost no token budget, so more ids
            # than it may come at once) would use up the ring while earlier steps read it.
            tensor, host = self._host.take() if index == 0 else _fresh(num_ints)
            _pack_rows(host, rows, ids_at)
            runs_end = runs_at + _RUN_FIELDS * len(is_counted)
            host[runs_at:runs_end] = _runs(is_counted)
            self._device[:num_ints].copy_(tensor[:num_ints], non_blocking=True)
            yield SentRows(
                packet=self._device,
                num_rows=len(rows),
                max_tokens=max(len(new.token_ids) for new in rows),
                runs=self._device[runs_at:runs_end].view(_RUN_FIELDS, -1),
            )

    def padding(self) -> SentRows:
        """A packet of one row that is padding, without a copy, for compiling."""
        self._device[:HEADER_INTS].fill_(-1)
        runs_at = aligned(HEADER_INTS)
        runs = self._device[runs_at : runs_at + _RUN_FIELDS].fill_(-1)
        return SentRows(self._device, num_rows=1, max_tokens=1, runs=runs.view(_RUN_FIELDS, 1))

    def _split(self, new_rows: Sequence[NewRow]) -> Iterator[list[NewRow]]:
        """The rows in order, as many at a time as fit into a packet."""
        rows: list[NewRow] = []
        num_ids = 0
        for new in new_rows:
            if len(rows) == self._max_rows or num_ids + len(new.token_ids) > self._max_ids:
                yield rows
                rows, num_ids = [], 0
            rows.append(new)
            num_ids += len(new.token_ids)
        if rows:
            yield rows


def _fresh(num_ints: int) -> tuple[torch.Tensor, IntArray]:
    """Pinned memory for one copy; torch's allocator keeps it until the stream is past that."""
    tensor = torch.empty(num_ints, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    return tensor, tensor.numpy()


def _pack_rows(host: IntArray, rows: Sequence[NewRow], ids_at: int) -> None:
    """Write the rows' headers at the beginning of host, and their token ids from ids_at on."""
    headers = host[: len(rows) * HEADER_INTS].view(_HEADER)
    for index, new in enumerate(rows):
        s, end = new.sampling, ids_at + len(new.token_ids)
        stop_ids = np.full(MAX_STOP_IDS, -1, dtype=np.int32)
        held_back = new.stop_token_ids[:MAX_STOP_IDS]
        stop_ids[: len(held_back)] = held_back
        headers[index] = (
            new.row, len(new.token_ids), ids_at, s.temperature, s.top_p, s.min_p,
            s.repetition_penalty, s.presence_penalty, s.frequency_penalty,
            # min_tokens may be more than any position is.
            s.top_k, s.seed, min(new.min_position, _MAX_POSITION), stop_ids,
        )  # fmt: skip
        host[ids_at:end] = new.token_ids
        ids_at = end


def _runs(rows: Sequence[NewRow]) -> IntArray:
    """int32 [3 * P]: rows, tokens of their prompts, all of their tokens."""
    numbers = [(new.row, new.num_prompt_tokens, len(new.token_ids)) for new in rows]
    return np.array(numbers, dtype=np.int32).reshape(-1, _RUN_FIELDS).T.ravel()
