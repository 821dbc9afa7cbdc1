"""What the tokens of a step mean for the rows: kept, published, or an end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from broker.ring.records import Finish, LongArray
from engine.flight import Flight
from engine.plan import IntArray, StepResult
from engine.prefix import distrust_row, register_next_blocks
from engine.residency import Residency
from engine.rows import STOP_WIDTH, RowIndex

_STOP, _LENGTH, _ERROR = (np.uint8(f) for f in (Finish.STOP, Finish.LENGTH, Finish.ERROR))
_REGISTER_PER_STEP = 32  # rows that enter a full output block into the prefix cache in one step


class Outcome(NamedTuple):
    """What one step gave: arrays for `StepEvents`, one entry a token or an end, in order."""

    step_id: int
    rids: LongArray
    token_ids: IntArray
    finish: npt.NDArray[np.uint8]
    started_rids: LongArray
    cached_tokens: IntArray
    num_tokens: int


def take_tokens(flight: Flight, result: StepResult, residency: Residency) -> Outcome:
    """Write a step's tokens into the rows and end the runs that they end."""
    t = residency.rows
    rows, token_ids, bad = flight.sample_rows, result.token_ids, result.bad
    if residency.closing:  # over-run tokens of runs that ended meanwhile
        live = ~t.ended[rows]
        rows, token_ids, bad = rows[live], token_ids[live], bad[live]
    position = t.known[rows]
    finish = _find_ends(residency, rows, token_ids, position)
    if np.count_nonzero(bad):
        finish[bad] = _ERROR
        token_ids = np.where(bad, np.int32(-1), token_ids)
        for row in rows[bad].tolist():
            distrust_row(t, residency.blocks, row)
    t.flat_tokens[t.token_offset[rows] + position] = token_ids
    t.known[rows] = position + 1
    rids = t.rid[rows]
    started_rids, cached = _NO_RIDS, _NO_IDS
    if flight.started_rows:
        started = [row for row in flight.started_rows if not t.ended[row]]
        started_rids, cached = t.rid[started], t.cached_tokens[started]
    if residency.blocks.enable_prefix_cache:
        filled = rows[position >= t.next_register[rows]]
        if len(filled):
            register_next_blocks(t, residency.blocks, filled[:_REGISTER_PER_STEP])
    if np.count_nonzero(finish):
        for row in rows[finish != 0].tolist():
            residency.end(row)
    return Outcome(
        step_id=flight.plan.step_id,
        rids=rids,
        token_ids=token_ids,
        finish=finish,
        started_rids=started_rids,
        cached_tokens=cached,
        num_tokens=flight.num_tokens,
    )


def _find_ends(
    residency: Residency, rows: RowIndex, token_ids: IntArray, position: IntArray
) -> npt.NDArray[np.uint8]:
    """uint8 [S]: how each of these tokens ends its run, if it does."""
    t = residency.rows
    finish = np.multiply(position + 1 >= t.limit[rows], _LENGTH)
    for column in t.stop_ids[: min(t.max_stop_ids, STOP_WIDTH)]:
        stops = column[rows] == token_ids
        if np.count_nonzero(stops):
            finish[stops & (position >= t.min_position[rows])] = _STOP
    if t.many_stop_ids:
        for i, row in enumerate(rows.tolist()):
            if int(token_ids[i]) in t.many_stop_ids.get(row, ()) and (
                position[i] >= t.min_position[row]
            ):
                finish[i] = _STOP
    return finish


_NO_RIDS: LongArray = np.zeros(0, np.uint64)
_NO_IDS: IntArray = np.zeros(0, np.int32)


def no_outcome(step_id: int) -> Outcome:
    """The outcome of no step, for a record that carries only ends."""
    return Outcome(
        step_id=step_id,
        rids=_NO_RIDS,
        token_ids=_NO_IDS,
        finish=np.zeros(0, np.uint8),
        started_rids=_NO_RIDS,
        cached_tokens=_NO_IDS,
        num_tokens=0,
    )
