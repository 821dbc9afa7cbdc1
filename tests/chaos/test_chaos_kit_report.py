"""The benchmark of faults: its counts name each damage, and a short run of it is clean."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace

import pytest

from ops.bench.chaos import main, parse
from ops.bench.chaos_audit import Seen, crc_of
from ops.bench.chaos_faults import Fault
from ops.bench.chaos_load import JobLog, Question
from ops.bench.chaos_report import Counts, count_logs, drift, quantile, takeovers
from tests.integration.worker import ROOT, environment
from tokenbus.errors import InvalidField

IDS = (5, 6, 7)
FIRST = Seen("j", "tokens", 1, 1, IDS[:2], "fg")
SECOND = Seen("j", "tokens", 1, 3, IDS[2:], "h")
DONE = Seen("j", "done", 1, 3, crc=crc_of(IDS), completion_tokens=3)


def count(*events: Seen) -> Counts:
    counts = Counts()
    counts.add_job("j", events, IDS, "fgh")
    return counts


def test_a_whole_job_counts_as_clean() -> None:
    counts = count(FIRST, SECOND, DONE)
    assert counts.is_clean
    assert (counts.jobs, counts.tokens) == (1, 3)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((), "lost"),
        ((FIRST, SECOND), "lost"),
        ((FIRST, Seen("j", "error", seq=2)), "lost"),
        ((FIRST, FIRST, SECOND, DONE), "repeated"),
        ((FIRST, replace(SECOND, seq=4), DONE), "holes"),
        ((FIRST, SECOND, replace(DONE, crc=1)), "wrong_crc"),
        ((FIRST, SECOND, DONE, DONE), "wrong_terminals"),
        ((FIRST, SECOND, replace(DONE, completion_tokens=9)), "wrong_usage"),
        ((FIRST, replace(SECOND, text="x"), DONE), "text_differs"),
        ((FIRST, replace(SECOND, ids=(8,)), DONE), "text_differs"),
    ],
)
def test_each_damage_has_its_count(events: tuple[Seen, ...], kind: str) -> None:
    counts = count(*events)
    assert not counts.is_clean
    assert counts.to_json()[kind] >= 1


def test_a_job_that_ended_in_an_error_is_told_in_words() -> None:
    log = JobLog("redis", Question({}, IDS, "fgh"), "j", error="busy: no room")
    counts = count_logs([log])
    assert counts.lost == 1
    assert "busy: no room" in counts.lines[-1]


def test_a_pause_is_the_first_silence_after_the_fault() -> None:
    log = JobLog("redis", Question({}, IDS, "fgh"), "j")
    log.batches = [(10.0, 1), (10.01, 2), (10.02, 3), (13.0, 4), (13.01, 5)]
    assert log.silence_after_s(10.015) == pytest.approx(2.98)
    assert log.silence_after_s(20.0) is None
    log.batches = [(10.0 + i / 100, i) for i in range(200)]
    assert log.silence_after_s(10.5) == 0.0


def test_pauses_are_told_by_kind_of_fault() -> None:
    faults = [Fault("engine_kill", 0.0, ("w",), [1.0, 2.0], 1.5), Fault("redis_cut", 5.0, ())]
    faults[0].undisturbed_s = [1.0]
    table = takeovers(faults)
    assert table["engine_kill"]["pause_max_s"] == 2.0
    assert table["engine_kill"]["undisturbed_max_s"] == 1.0
    assert table["redis_cut"] == {
        "faults": 1,
        "jobs_hit": 0,
        "ready_p50_s": 0.0,
        "ready_p99_s": 0.0,
    }
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_drift_compares_the_first_quarter_with_the_last() -> None:
    mib = 2**20
    samples = [(float(i), {"broker": (100 if i < 4 else 102) * mib}) for i in range(8)]
    assert drift(samples)["broker"]["drift_percent"] == 2.0


async def test_a_short_run_counts_no_damage_and_ends_with_one_json_line() -> None:
    arguments = ("--seed", "4", "--count", "3", "--every-s", "2", "--lease-s", "2", "--json")
    faults = ("--faults", "engine_kill", "redis_cut", "--minutes", "1", "--jobs", "6")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.bench.chaos", *arguments, *faults),
        cwd=ROOT,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, errors.decode() + output.decode()
    result = json.loads(output)
    assert result["faults"] == 3
    assert result["clients"]["jobs"] > 6
    assert result["clients"]["lost"] == result["streams"]["lost"] == 0


@pytest.mark.parametrize("field", ["faults", "doors"])
def test_a_name_that_does_not_exist_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(InvalidField, match="unknown engine_kil") as refused:
        parse([f"--{field}", "engine_kil"])
    assert refused.value.field == field


def test_the_command_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--faults", "engine_kill", "meteor"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("faults: unknown meteor; there are engine_kill, ")
