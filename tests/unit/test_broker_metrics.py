"""What the broker counts, and how it is exported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from broker.metrics import SLOTS, Metrics
from broker.metrics_catalogue import CATALOGUE, Kind
from broker.metrics_export import Exporter
from broker.metrics_histogram import Histogram
from broker.ring.records import Finish, StepEvents

MS = 1_000_000


def step(
    at_ms: float,
    rids: Sequence[int],
    *,
    ends: Sequence[int] = (),
    silent: Sequence[int] = (),
    cached: Sequence[int] = (),
    **load: int,
) -> StepEvents:
    """ends: rids that end here. silent: those of them without a token."""
    return StepEvents(
        step_id=1,
        time_ns=int(at_ms * MS) + 10**9,
        rids=np.array(rids, np.uint64),
        token_ids=np.array([-1 if rid in silent else 7 for rid in rids], np.int32),
        finish=np.array([Finish.LENGTH if rid in ends else 0 for rid in rids], np.uint8),
        started_rids=np.arange(len(cached), dtype=np.uint64),
        cached_tokens=np.array(cached, np.int32),
        **{"batch_tokens": len(rids), "step_us": 500, **load},
    )


def gaps(metrics: Metrics) -> tuple[int, float]:
    """Number and sum in ms of the times between tokens."""
    histogram = metrics.histogram("inter_token_seconds")
    return histogram.count, round(1e3 * histogram.sum, 6)


def exported(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = Exporter(metrics).render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_time_between_tokens_is_that_of_each_run() -> None:
    metrics = Metrics()
    metrics.take_steps([step(0, [1, 2]), step(3, [1]), step(10, [1, 2])])
    assert gaps(metrics) == (3, 3 + 7 + 10)


def test_a_run_that_ended_leaves_nothing_to_the_next_in_its_slot() -> None:
    metrics = Metrics()
    metrics.take_steps([step(0, [1]), step(5, [1], ends=[1])])
    metrics.take_steps([step(50, [1 + SLOTS])])
    assert gaps(metrics) == (1, 5)


def test_an_end_without_a_token_is_no_token() -> None:
    metrics = Metrics()
    metrics.take_steps([step(0, [1, 2]), step(4, [1, 2], ends=[2], silent=[2])])
    assert gaps(metrics) == (1, 4)
    assert metrics.get("output_tokens_total") == 3


def test_an_engine_that_is_gone_takes_its_runs_along() -> None:
    metrics = Metrics()
    metrics.engine_up(8)
    metrics.take_steps([step(0, [1])])
    metrics.engine_gone()
    metrics.engine_up(8)
    metrics.take_steps([step(900, [1])])
    assert gaps(metrics) == (0, 0)
    names = ("engine_up", "engine_losses_total", "engine_restarts_total")
    assert [metrics.get(name) for name in names] == [1, 1, 1]


def test_preemptions_are_counted_on_over_engines_that_start_at_zero() -> None:
    metrics = Metrics()
    metrics.engine_up(8)
    metrics.take_steps([step(0, [1], preemptions=3), step(1, [1], preemptions=5)])
    metrics.engine_gone()
    metrics.engine_up(8)
    metrics.take_steps([step(0, [1], preemptions=2)])
    assert metrics.get("preemptions_total") == 7


def test_a_step_s_sizes_and_prefix_hits_are_counted() -> None:
    metrics = Metrics()
    metrics.take_steps([step(0, [1, 2], cached=[16, 32], batch_tokens=40, used_blocks=3)])
    assert metrics.get("prefix_hit_tokens_total") == 48
    assert metrics.get("computed_tokens_total") == 40
    assert metrics.get("kv_blocks_used") == 3
    assert metrics.histogram("step_rows").sum == 2
    assert metrics.histogram("step_seconds").sum == pytest.approx(0.0005)


def test_an_end_outside_a_step_counts_as_no_step() -> None:
    metrics = Metrics()
    metrics.take_steps([step(0, [1], ends=[1], silent=[1], step_us=0, batch_tokens=0)])
    assert metrics.get("steps_total") == 0
    assert metrics.histogram("step_rows").count == 0


def test_phases_add_up_from_their_means() -> None:
    metrics = Metrics()
    metrics.take_stats({"launch_us": 100.0, "interval_steps": 50, "cached_blocks": 4})
    metrics.take_stats({"launch_us": 300.0, "interval_steps": 10})
    assert metrics.get("phase_seconds_total", ("launch",)) == pytest.approx(0.008)


def test_a_name_that_is_not_in_the_catalogue_is_an_error() -> None:
    metrics = Metrics()
    for use in (metrics.add, metrics.get, metrics.histogram):
        with pytest.raises(KeyError):
            use("jobs_totl")
    with pytest.raises(KeyError):
        metrics.set("jobs_totl", 1)


@given(st.lists(st.floats(0, 20), max_size=50), st.integers(1, 5))
def test_values_at_once_count_like_values_one_by_one(values: list[float], parts: int) -> None:
    bounds = (0.5, 1.0, 2.0, 10.0)
    together, single = Histogram(bounds), Histogram(bounds)
    for part in np.array_split(np.array(values), parts):
        together.observe_all(part)
    for value in values:
        single.observe(value)
    assert together.cumulative() == single.cumulative()
    assert together.sum == pytest.approx(single.sum)
    expected = [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    assert [count for _, count in together.cumulative()] == expected


def test_the_export_has_every_metric_once_and_parses() -> None:
    metrics = Metrics()
    for metric in CATALOGUE:
        labels = tuple("x" for _ in metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            metrics.histogram(metric.name, labels).observe(0.003)
        else:
            metrics.set(metric.name, 5, labels)
    samples = exported(metrics)
    for metric in CATALOGUE:
        labels = tuple((label, "x") for label in sorted(metric.labels))
        if metric.kind is Kind.HISTOGRAM:
            assert samples[(f"{metric.full_name}_count", labels)] == 1
        else:
            assert samples[(metric.full_name, labels)] == 5


def test_counters_without_labels_are_there_from_the_beginning() -> None:
    """`increase` sees the first rise only of a series that was there before it."""
    samples = exported(Metrics())
    for metric in CATALOGUE:
        if metric.kind is Kind.COUNTER and not metric.labels:
            assert samples[(metric.full_name, ())] == 0


async def test_reading_while_writing_is_safe() -> None:
    """The exporter runs in another thread than the loop that counts."""
    metrics, exporter = Metrics(), None
    exporter = Exporter(metrics)

    async def write() -> None:
        for number in range(300):
            metrics.add("jobs_total", 1, ("zmq", f"outcome-{number}"))
            metrics.histogram("ttft_seconds", (f"door-{number}",)).observe(0.1)
            await asyncio.sleep(0)

    async def read() -> list[Any]:
        return [await asyncio.to_thread(exporter.render) for _ in range(20)]

    _, pages = await asyncio.gather(write(), read())
    assert all(b"tokenbus_jobs_total" in page for page in pages)


def test_what_nobody_knows_any_more_is_not_exported() -> None:
    metrics = Metrics()
    metrics.set("backlog_oldest_seconds", 70)
    assert ("tokenbus_backlog_oldest_seconds", ()) in exported(metrics)
    metrics.clear("backlog_oldest_seconds")
    assert ("tokenbus_backlog_oldest_seconds", ()) not in exported(metrics)
