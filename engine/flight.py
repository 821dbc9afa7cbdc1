"""A step that is planned and not completed yet: from the rows that it computes to its plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.plan import IntArray, StepPlan
from engine.residency import Residency
from engine.rows import Phase, RowIndex


class Flight(NamedTuple):
    """A step that was planned and is not completed yet.

    rows, sample_rows: int64; rows of the plan, and those that yield a token, in order.
    started_rows: rows that give their first token with this step.
    """

    plan: StepPlan
    rows: RowIndex
    sample_rows: RowIndex
    started_rows: list[int]
    num_tokens: int


def make_flight(
    step_id: int, residency: Residency, decode: RowIndex, chunks: list[tuple[int, int]]
) -> Flight:
    """Make the plan of a step and move the rows on by what it computes.

    decode: int64 [D], rows that compute one token. chunks: rows that compute a piece of their
    prompt, each with the tokens of the piece.
    """
    t = residency.rows
    num_decode = len(decode)
    rows = decode
    num_new = t.one_token[:num_decode]
    sample = t.all_sample[:num_decode]
    if chunks:
        chunk_rows, chunk_lens = zip(*chunks, strict=True)
        rows = np.concatenate([decode, np.array(chunk_rows, np.int64)])
        num_new = np.concatenate([num_new, np.array(chunk_lens, np.int32)])
    num_computed = t.computed[rows]
    done = num_computed + num_new
    sample_rows = rows
    samples_all = not (chunks or t.replays_by_decode)
    if not samples_all:
        sample = done == t.length[rows]
        sample_rows = rows[sample]
    if chunks:
        _end_prompts(residency, rows[num_decode:], done[num_decode:])
    t.computed[rows] = done
    started = _count_tokens(residency, sample_rows)
    block_rows, block_cols, block_ids = t.take_changes()
    plan = StepPlan(
        step_id=step_id,
        new_rows=residency.take_new_rows(),
        block_rows=block_rows,
        block_cols=block_cols,
        block_ids=block_ids,
        rows=rows.astype(np.int32),
        num_computed=num_computed,
        num_new=num_new,
        sample=sample,
        num_decode=num_decode,
        samples_all=samples_all,
    )
    num_tokens = num_decode + sum(length for _, length in chunks)
    return Flight(plan, rows, sample_rows, started, num_tokens)


def _end_prompts(residency: Residency, rows: RowIndex, done: IntArray) -> None:
    """Rows (int64 [C]) whose prompt is computed when they are `done` (int32 [C]) decode from now
    on.
    """
    t = residency.rows
    ends = np.minimum(t.length[rows], t.chunk_end[rows])
    for row in rows[done == ends].tolist():
        residency.displace(row)
        t.phase[row] = Phase.DECODE
        residency.place(row)


def _count_tokens(residency: Residency, sample_rows: RowIndex) -> list[int]:
    """Count one more token for each row that samples; returns those that give their first."""
    t = residency.rows
    length = t.length[sample_rows] + 1
    t.length[sample_rows] = length
    new = ~t.started[sample_rows]
    started: list[int] = []
    if np.count_nonzero(new):
        started = sample_rows[new].tolist()
        t.started[started] = True
    last = sample_rows[length >= t.limit[sample_rows]]
    if len(last):
        t.phase[last] = Phase.FULL
        t.decodable[last] = False
    return started
