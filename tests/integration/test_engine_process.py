"""The engine process with a fake model behind a real link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from broker.ring import records
from broker.ring.link import BrokerLink, LinkListener
from broker.ring.records import Finish, Kind, Submit
from engine.config import EngineConfig, FakeModel
from tests.unit.engine_harness import VOCAB, make_submit, undisturbed

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


class Engine:
    """An engine process, the listener it connects to, and what it said on the current link."""

    def __init__(self, folder: Path, ring_bytes: int = 1 << 20, **fake: int | float | bool) -> None:
        model = FakeModel(vocab_size=VOCAB, **fake)  # type: ignore[arg-type]
        config = folder / "engine.json"
        config.write_text(EngineConfig(fake=model, max_num_seqs=16).to_json())
        (folder / "run").mkdir(mode=0o700)
        path = folder / "run" / "link"
        self.listener = LinkListener(path, ring_bytes)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "--config", config, "--link", path],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
            stderr=subprocess.PIPE,
        )
        self.said: list[tuple[int, bytes]] = []
        self.link = self.accept()

    def accept(self) -> BrokerLink:
        """Take the engine's next connection and wait until it is ready."""
        self.link = self.listener.accept(TIMEOUT_S)
        self.said.clear()
        self.wait(lambda: any(kind == Kind.READY for kind, _ in self.said))
        return self.link

    def wait(self, done: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Read events until `done` holds."""
        deadline = time.monotonic() + timeout_s
        while not done():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"nothing after {timeout_s} s; said {self.said[-3:]}"
            self.link.events.wait(min(left_s, 0.2), watch_fd=-1)
            self.said += self.link.events.read_batch(1000)

    def submit(self, submit: Submit) -> Submit:
        assert self.link.requests.try_write(Kind.SUBMIT, records.encode_submit(submit))
        return submit

    def tokens(self, rid: int) -> list[int]:
        steps = [records.decode_step(data) for kind, data in self.said if kind == Kind.STEP]
        return [
            token
            for step in steps
            for r, token in zip(step.rids.tolist(), step.token_ids.tolist(), strict=True)
            if r == rid
        ]

    def ended(self, rid: int) -> Finish | None:
        for kind, data in self.said:
            if kind == Kind.STEP:
                step = records.decode_step(data)
                for r, finish in zip(step.rids.tolist(), step.finish.tolist(), strict=True):
                    if r == rid and finish:
                        return Finish(finish)
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.link.close()
        self.listener.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fake: int | float | bool) -> Engine:
        engines.append(Engine(tmp_path, **fake))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_runs_cross_the_link_and_shutdown_exits_with_zero(
    start: Callable[..., Engine], is_async: bool
) -> None:
    engine = start(is_async=is_async)
    runs = [engine.submit(make_submit(rid, [rid, 2], 40)) for rid in range(1, 30)]
    engine.wait(lambda: all(engine.ended(run.rid) for run in runs))
    for run in runs:
        assert engine.tokens(run.rid) == undisturbed(run)
    assert engine.link.requests.try_write(Kind.SHUTDOWN, b"")
    assert engine.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_sigterm_ends_the_loop_at_once_with_zero(
    start: Callable[..., Engine], is_busy: bool
) -> None:
    engine = start(step_ms=5.0)
    if is_busy:
        engine.submit(make_submit(1, [1], 4000))
        engine.wait(lambda: len(engine.tokens(1)) > 3)
    begin = time.monotonic()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(TIMEOUT_S) == 0
    assert time.monotonic() - begin < 2.0


def test_a_broker_that_goes_away_is_replaced_without_loading_again(
    start: Callable[..., Engine],
) -> None:
    engine = start(step_ms=2.0)
    engine.submit(make_submit(1, [1], 4000))
    engine.wait(lambda: len(engine.tokens(1)) > 3)
    engine.link.close()
    engine.accept()
    run = engine.submit(make_submit(1, [5, 6], 10))
    engine.wait(lambda: engine.ended(1) is not None)
    assert engine.tokens(1) == undisturbed(run)
    assert engine.process.poll() is None


def test_a_prompt_that_kills_the_engine_shows_as_the_end_of_the_link(
    start: Callable[..., Engine],
) -> None:
    engine = start(crash_token=90)
    engine.submit(make_submit(1, [1, 90], 4))
    assert engine.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert engine.link.is_peer_gone()


def test_a_full_event_ring_holds_the_engine_back_and_loses_nothing(
    start: Callable[..., Engine],
) -> None:
    engine = start(ring_bytes=1 << 16)
    runs = [engine.submit(make_submit(rid, [rid], 2000)) for rid in range(1, 13)]
    process = psutil.Process(engine.process.pid)

    def used_s() -> float:
        return float(sum(process.cpu_times()[:2]))

    assert engine.link.events.wait(TIMEOUT_S)
    deadline, before = time.monotonic() + TIMEOUT_S, -1.0
    while used_s() - before > 0.05:  # of half a second
        assert time.monotonic() < deadline, "the engine works on, or spins, before a full ring"
        before = used_s()
        time.sleep(0.5)  # a window for the CPU clock, not a wait for an event
    engine.wait(lambda: all(engine.ended(run.rid) for run in runs))
    for run in runs:
        assert engine.tokens(run.rid) == undisturbed(run)
    assert sum(kind == Kind.STEP for kind, _ in engine.said) >= 2000


def test_an_idle_engine_sleeps_and_reports_once_a_second(start: Callable[..., Engine]) -> None:
    engine = start()
    process = psutil.Process(engine.process.pid)
    before, begin = sum(process.cpu_times()[:2]), time.monotonic()
    engine.wait(lambda: sum(kind == Kind.STATS for kind, _ in engine.said) >= 3)
    used_s, passed_s = sum(process.cpu_times()[:2]) - before, time.monotonic() - begin
    assert passed_s > 1.5
    assert used_s / passed_s < 0.03


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "engine.config_unusable"), ('{"no_such_key": 1}', "no_such_key"), ("{}", "model_path")],
)
def test_a_configuration_that_cannot_be_used_is_named(tmp_path: Path, text: str, word: str) -> None:
    config = tmp_path / "engine.json"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "engine", "--config", config, "--link", tmp_path / "link"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == (3 if text == "{}" else 2)
    assert word in done.stderr


def test_a_fake_model_needs_no_torch_and_no_socket_libraries() -> None:
    code = (
        "import sys, engine.__main__, engine.fake_runner; "
        "print(sorted({'torch', 'zmq', 'redis', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
