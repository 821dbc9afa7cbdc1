"""Steps of the engine -> tokens of jobs. The one place that looks at every token in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.ledger.job import Job
from broker.ledger.runs import Runs
from broker.ring.records import Finish, StepEvents


def take_steps(runs: Runs, steps: Sequence[StepEvents]) -> Iterator[tuple[Job, int]]:
    """Collect the ids of these steps in their jobs' `fresh`, and yield each job once: with its
    finish when its run ended, else with NOT_FINISHED after the last step. Tokens of runs that were
    aborted are dropped.
    """
    touched: list[Job] = []
    for step in steps:
        if len(step.started_rids):
            _note_started(runs, step)
        if step.finish.tobytes().strip(b"\0"):  # cheaper than to ask numpy for a few rows
            yield from _take_ends(runs, step, touched)
            continue
        by_rid = runs.by_rid
        for rid, token_id in zip(step.rids.tolist(), step.token_ids.tolist(), strict=True):
            job = by_rid.get(rid)
            if job is not None:
                if not job.fresh:
                    touched.append(job)
                job.fresh.append(token_id)
    for job in touched:
        if job.fresh:
            yield job, Finish.NOT_FINISHED


def _note_started(runs: Runs, step: StepEvents) -> None:
    started = zip(step.started_rids.tolist(), step.cached_tokens.tolist(), strict=True)
    for rid, cached_tokens in started:
        job = runs.by_rid.get(rid)
        if job is not None and not job.first_token_ns:
            job.cached_tokens = cached_tokens


def _take_ends(runs: Runs, step: StepEvents, touched: list[Job]) -> Iterator[tuple[Job, int]]:
    """A step in which some runs ended."""
    columns = step.rids.tolist(), step.token_ids.tolist(), step.finish.tolist()
    for rid, token_id, finish in zip(*columns, strict=True):
        job = runs.ended(rid) if finish else runs.by_rid.get(rid)
        if job is None:
            continue
        if token_id >= 0:
            if not job.fresh:
                touched.append(job)
            job.fresh.append(token_id)
        if finish:
            yield job, finish
