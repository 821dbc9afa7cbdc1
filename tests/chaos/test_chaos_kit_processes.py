"""Process helpers: events, stopping, killing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.kit import processes
from tests.chaos.kit.processes import STATUS_FD, Child

SAY = "import json,sys,os,time; f=os.fdopen({fd},'w'); "
HELLO = "[print(json.dumps(dict(event='step', n=n)), file=f, flush=True) for n in range(3)]; "


def child(tmp_path: Path, code: str, *args: str) -> Child:
    return Child([sys.executable, "-S", "-c", code, *args], tmp_path / "log")


def test_events_are_awaited_by_name_and_by_content(tmp_path: Path) -> None:
    code = SAY.format(fd=1) + HELLO + "time.sleep(60)"
    with child(tmp_path, code) as process:
        assert process.wait_event("step")["n"] == 0
        assert process.wait_event("step", where=lambda e: e["n"] == 2)["n"] == 2
        with pytest.raises(AssertionError, match="no 'ready' within"):
            process.wait_event("ready", timeout_s=0.02)


def test_events_come_over_a_status_pipe_where_the_command_has_one(tmp_path: Path) -> None:
    code = SAY.format(fd="int(sys.argv[1])") + "print('noise'); " + HELLO
    with child(tmp_path, code, STATUS_FD) as process:
        assert process.wait_event("step", where=lambda e: e["n"] == 2)
        assert process.wait_exit() == 0
    assert "noise" in process.log_path.read_text()


def test_an_early_end_shows_exit_status_and_log(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import sys; sys.exit('broken config')") as process,
        pytest.raises(AssertionError, match=r"(?s)ended before 'ready'.*broken config"),
    ):
        process.wait_event("ready")


def test_lines_that_are_no_event_are_skipped(tmp_path: Path) -> None:
    with child(tmp_path, "print('x'); print('[1]'); print('{\"event\": \"ready\"}')") as process:
        assert process.wait_event("ready") == {"event": "ready"}


def test_a_stopped_process_stands_still_until_resumed(tmp_path: Path) -> None:
    with child(tmp_path, "import time; time.sleep(60)") as process:
        processes.stop(process.pid)
        assert processes.state_of(process.pid) == "T"
        processes.resume(process.pid)
        assert processes.state_of(process.pid) in ("S", "R")


def test_kill_ends_any_process_and_the_dead_are_no_error(tmp_path: Path) -> None:
    with child(tmp_path, "import time; time.sleep(60)") as process:
        processes.kill(process.pid)
        assert process.wait_exit() == -signal.SIGKILL
        processes.kill(process.pid)
        assert processes.state_of(process.pid) == ""


def test_descendants_are_found_down_to_the_last(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "for _ in range(2):\n"
        "    if os.fork(): break\n"
        'else: print(\'{"event": "ready"}\', flush=True)\n'
        "time.sleep(60)"
    )
    with child(tmp_path, code) as process:
        process.wait_event("ready")
        found = processes.descendants(process.pid)
        assert len(found) == 2
        for pid in found:
            processes.kill(pid)


def test_terminate_is_polite(tmp_path: Path) -> None:
    with child(tmp_path, "import time; time.sleep(60)") as process:
        process.terminate()
        assert process.wait_exit() == -signal.SIGTERM
