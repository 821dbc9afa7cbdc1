"""`tokenbus top`: rates from samples, and what fits on a small terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import pytest
from rich.console import Console

from ops.top_sample import Rates, Sample, Trend, WorkerSample
from ops.top_view import bar, render, sparkline

VITALS = {
    "at_ms": 1_000.0,
    "output_tokens": 100.0,
    "jobs_ended": 1.0,
    "itl_sum_ms": 500.0,
    "itl_count": 50.0,
    "running": 18.0,
    "waiting": 5.0,
    "max_running": 16.0,
    "used_blocks": 30.0,
    "total_blocks": 40.0,
    "ttft_p50_ms": 120.0,
    "ttft_p95_ms": 300.0,
}


def worker(name: str = "w", state: str = "ready", **changed: float) -> WorkerSample:
    return WorkerSample(name, "m", state, VITALS | changed)


def sample(*workers: WorkerSample, backlog: Mapping[str, int] | None = None) -> Sample:
    return Sample("default", "redis://h:6379/0", workers, backlog or {}, dead=2)


def trend_of(*samples: Sample) -> Trend:
    trend = Trend()
    for one in samples:
        trend.add(one)
    return trend


LATER = {
    "at_ms": 3_000.0,
    "output_tokens": 500.0,
    "jobs_ended": 5.0,
    "itl_sum_ms": 900.0,
    "itl_count": 150.0,
}


def test_rates_are_what_grew_over_the_worker_s_own_time() -> None:
    trend = trend_of(sample(worker()), sample(worker(**LATER)))
    assert trend.rates["w"] == Rates(tokens_s=200.0, jobs_s=2.0, itl_ms=4.0)


def test_a_worker_that_told_nothing_new_keeps_its_rates() -> None:
    trend = trend_of(sample(worker()), sample(worker(**LATER)), sample(worker(**LATER)))
    assert trend.rates["w"].tokens_s == 200.0
    assert list(trend.tokens_s) == [200.0, 200.0]


def test_a_broker_that_was_started_again_has_no_rate_for_one_look() -> None:
    trend = trend_of(sample(worker(**LATER)), sample(worker(at_ms=9_000, output_tokens=1)))
    assert trend.rates["w"] == Rates()


def test_a_worker_that_is_gone_makes_no_tokens() -> None:
    trend = trend_of(sample(worker()), sample(worker(**LATER)), sample(worker("w", "gone")))
    assert trend.rates["w"] == Rates()
    trend.add(sample())
    assert trend.rates == {}


def test_there_are_no_rates_before_every_worker_has_told_twice() -> None:
    trend = trend_of(sample(worker("a")), sample(worker("a", **LATER), worker("b")))
    assert not trend.is_settled
    trend.add(sample(worker("a", **LATER), worker("b", **LATER)))
    assert trend.is_settled
    assert trend.total.tokens_s == 400.0
    assert trend.total.itl_ms == pytest.approx(4.0)


def test_the_json_sample_has_totals_and_workers() -> None:
    now = sample(worker("a", **LATER), worker("b", **LATER), backlog={"normal": 7})
    trend = trend_of(sample(worker("a"), worker("b")), now)
    facts = json.loads(json.dumps(trend.facts(now)))
    assert (facts["running"], facts["waiting"]) == (32, 14)
    assert (facts["tokens_s"], facts["backlog"], facts["dead"]) == (400.0, {"normal": 7}, 2)
    assert [w["running"] for w in facts["workers"]] == [16, 16]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([0, 0], "▁▁"), ([0, 7, 14], "▁▅█"), ([9, 9, 1, 2, 4], "▃▅█"), ([5], "█")],
)
def test_a_sparkline_shows_the_last_values(values: list[float], expected: str) -> None:
    assert sparkline(values, 3) == expected


@pytest.mark.parametrize(
    ("share", "full", "style"),
    [(0.0, 0, "green"), (0.5, 4, "green"), (0.75, 6, "yellow"), (0.95, 8, "red"), (2.0, 8, "red")],
)
def test_a_bar_is_as_full_as_its_share(share: float, full: int, style: str) -> None:
    text = bar(share, 8)
    assert text.plain == "━" * 8
    assert (text.spans[0].end if full else 0, str(text.spans[0].style) if full else style) == (
        full,
        style,
    )


def screen(one: Sample, trend: Trend, width: int, height: int, **more: str) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(render(one, trend, width=width, height=height, **more))
    return capture.get().splitlines()


@pytest.mark.parametrize("num_workers", [0, 1, 3, 50])
def test_everything_fits_on_80_columns_and_24_lines(num_workers: int) -> None:
    names = [f"a-host-with-a-long-name-{i}-12345-abcd" for i in range(num_workers)]
    huge = {"output_tokens": 9e7, "ttft_p50_ms": 98_765.0, "waiting": 9_999.0, "running": 256.0}
    first = sample(*(worker(name) for name in names))
    backlog = {"high": 100_000, "normal": 99_999, "low": 12_345}
    now = sample(
        *(worker(name, **{**LATER, **huge, "max_running": 256.0}) for name in names),
        backlog=backlog,
    )
    lines = screen(now, trend_of(first, now), 80, 24, footer="q quits")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "q quits" in lines[-1]
    if num_workers == 50:
        assert "more" in lines[-3]


def test_trouble_takes_the_place_of_the_footer() -> None:
    now = sample(worker(**LATER))
    lines = screen(now, trend_of(now), 80, 24, footer="q quits", trouble="redis://h: timed out")
    assert "timed out" in lines[-1]
    assert "0 of" not in lines[0]


def test_the_numbers_of_a_worker_are_on_its_line() -> None:
    now = sample(worker("host-1", **LATER), backlog={"normal": 7, "low": 0})
    lines = screen(now, trend_of(sample(worker("host-1")), now), 80, 24)
    assert lines[0].startswith("tokenbus · queue default · redis://h:6379/0")
    assert lines[0].endswith("1 of 1 workers ready")
    assert "running 16 of 16 rows · waiting 7 · in Redis 7 (normal 7) · dead 2" in lines[2]
    [line] = [line for line in lines if line.startswith("host-1")]
    assert line.split() == ["host-1", "m", "ready", "16", "7", "200", "120ms", "4.0ms",
                            "━" * 8, "75%"]  # fmt: skip
