"""The supervisor with real processes: small scripts in the place of broker and engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.actor import ActorSystem
from ops.child import ChildSpec, describe_exit
from ops.exit_codes import ExitCode
from ops.supervisor import Supervisor
from ops.supervisor_messages import Ready, Stop, WorkerEvent
from tests.chaos.kit.processes import is_alive

# Reports ready on its status pipe, stops with code 0 on SIGTERM.
BROKER = """
import os, signal, sys, json
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(int(sys.argv[1]), b'{"event": "ready", "zmq": "tcp://127.0.0.1:1"}\\n')
while True: signal.pause()
"""
STUBBORN_BROKER = BROKER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
ENGINE = "import signal\nwhile True: signal.pause()"


def spec(name: str, script: str) -> ChildSpec:
    argv = (sys.executable, "-c", script)
    return ChildSpec(name, (*argv, "{status_fd}") if name == "broker" else argv)


class Harness:
    """A supervisor and the events it gave."""

    def __init__(self, *specs: ChildSpec, drain_s: float = 5.0) -> None:
        self.system = ActorSystem(asyncio.get_running_loop())
        self.events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.supervisor = Supervisor(
            self.system, specs, drain_s=drain_s, on_event=self.events.put_nowait
        )
        self.system.start()

    async def ready(self) -> Ready:
        event = await asyncio.wait_for(self.events.get(), 20)
        assert isinstance(event, Ready)
        return event

    async def result(self) -> ExitCode:
        return await asyncio.wait_for(self.supervisor.finished, 20)


@pytest.fixture
async def harnesses() -> AsyncIterator[list[Harness]]:
    made: list[Harness] = []
    yield made
    for harness in made:
        await harness.system.stop()


async def test_stop_drains_the_broker_then_stops_the_engine_with_exit_code_0(
    harnesses: list[Harness],
) -> None:
    harness = Harness(spec("broker", BROKER), spec("engine", ENGINE))
    harnesses.append(harness)
    ready = await harness.ready()
    harness.supervisor.tell(Stop("test"))
    assert await harness.result() is ExitCode.OK
    assert ready.is_first
    assert set(ready.pids) == {"broker", "engine"}
    assert not any(is_alive(pid) for pid in ready.pids.values())


async def test_a_killed_broker_is_started_again_and_its_engine_stays(
    harnesses: list[Harness],
) -> None:
    harness = Harness(spec("broker", BROKER), spec("engine", ENGINE))
    harnesses.append(harness)
    first = await harness.ready()
    while "engine" not in first.pids:  # the broker may report before the engine was started
        os.kill(first.pids["broker"], signal.SIGKILL)
        first = await harness.ready()
    os.kill(first.pids["broker"], signal.SIGKILL)
    second = await harness.ready()
    assert not second.is_first
    assert second.pids["broker"] != first.pids["broker"]
    assert second.pids["engine"] == first.pids["engine"]
    assert is_alive(second.pids["engine"])


async def test_an_engine_that_never_gets_ready_is_given_up_after_three_crashes(
    harnesses: list[Harness], tmp_path: Path
) -> None:
    log = tmp_path / "starts"
    crashing = f"open({str(log)!r}, 'a').write('x'); import os; os.abort()"
    broker = BROKER.replace("os.write(", "0 and os.write(")  # not ready without an engine
    harness = Harness(spec("broker", broker), spec("engine", crashing))
    harnesses.append(harness)
    assert await harness.result() is ExitCode.ENGINE_LOST
    assert log.read_text() == "xxx"


async def test_an_engine_that_says_its_model_is_wrong_is_not_started_again(
    harnesses: list[Harness], tmp_path: Path
) -> None:
    log = tmp_path / "starts"
    script = f"open({str(log)!r}, 'a').write('x'); raise SystemExit({ExitCode.MODEL_UNAVAILABLE})"
    broker = BROKER.replace("os.write(", "0 and os.write(")
    harness = Harness(spec("broker", broker), spec("engine", script))
    harnesses.append(harness)
    assert await harness.result() is ExitCode.MODEL_UNAVAILABLE
    assert log.read_text() == "x"


async def test_a_broker_that_does_not_stop_in_time_is_killed(
    harnesses: list[Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.supervisor.DRAIN_MARGIN_S", 0.1)
    harness = Harness(spec("broker", STUBBORN_BROKER), spec("engine", ENGINE), drain_s=0.1)
    harnesses.append(harness)
    ready = await harness.ready()
    harness.supervisor.tell(Stop("test"))
    assert await harness.result() is ExitCode.OK
    assert not is_alive(ready.pids["broker"])


async def test_a_broker_that_drained_by_itself_ends_the_worker(harnesses: list[Harness]) -> None:
    """A drain can be asked for over the bus; the broker then ends with code 0."""
    harness = Harness(spec("broker", BROKER), spec("engine", ENGINE))
    harnesses.append(harness)
    ready = await harness.ready()
    os.kill(ready.pids["broker"], signal.SIGTERM)
    assert await harness.result() is ExitCode.OK


async def test_an_engine_that_ends_in_a_drain_over_the_bus_is_not_started_again(
    harnesses: list[Harness], tmp_path: Path
) -> None:
    """The broker says that it drains, tells the engine to end, and itself ends after it."""
    pids = tmp_path / "pids"
    engine = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
while True: signal.pause()
"""
    drain = f"""
def drain(*_):
    os.write(int(sys.argv[1]), b'{{"event": "draining"}}\\n')
    pid = int(open({str(pids)!r}).read())
    os.kill(pid, signal.SIGTERM)
    while os.path.exists(f"/proc/{{pid}}"): time.sleep(0.01)
    time.sleep(0.5)  # longer than the pause before a new start
    sys.exit(0)
import time
"""
    broker = drain + BROKER.replace("lambda *_: sys.exit(0)", "drain")
    harness = Harness(spec("broker", broker), spec("engine", engine))
    harnesses.append(harness)
    ready = await harness.ready()
    async with asyncio.timeout(20):
        while not pids.exists() or not pids.read_text():
            await asyncio.sleep(0.01)
    os.kill(ready.pids["broker"], signal.SIGTERM)
    assert await harness.result() is ExitCode.OK
    assert len(pids.read_text().split()) == 1


async def test_a_second_stop_does_not_wait_for_the_drain(harnesses: list[Harness]) -> None:
    harness = Harness(spec("broker", STUBBORN_BROKER), spec("engine", ENGINE), drain_s=600)
    harnesses.append(harness)
    await harness.ready()
    harness.supervisor.tell(Stop("first"))
    harness.supervisor.tell(Stop("second"))
    assert await harness.result() is ExitCode.OK


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no process behind: the kernel tells its children."""
    script = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from ops.child import ChildSpec, start_child
async def main():
    child = await start_child(ChildSpec("engine", (sys.executable, "-c", {ENGINE!r})))
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child_pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    pidfd = os.pidfd_open(child_pid)
    try:
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, gone.set)  # readable when it has ended
        parent.kill()
        await parent.wait()
        await asyncio.wait_for(gone.wait(), 10)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_exits_are_described_in_words(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text
