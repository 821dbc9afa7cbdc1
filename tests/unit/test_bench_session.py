"""The benchmark session: parts run in order and apart, results keep their form."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.gpu_parts import Part, Setting, all_parts
from bench.gpu_session import Session, add_deterministic_cost, joined
from bench.report import TARGETS, ResultFile

FIELDS = {"what", "value", "unit", "target", "floor", "command", "date", "machine", "versions"}


def python(code: str) -> list[str]:
    """A command of a part: parts are modules, so a module that runs code."""
    return ["timeit", "-n", "1", "-r", "1", code]


@contextmanager
def make_session(tmp_path: Path, limit_s: float = 60.0) -> Iterator[Session]:
    session = Session(Setting(tmp_path, "cpu", None), limit_s)
    yield session
    session.close()


def test_a_result_line_has_every_field_and_its_target(tmp_path) -> None:
    results = ResultFile(tmp_path / "new" / "r.jsonl")
    results.add("qwen3-8b.decode_tok_s.b64", 9000.123456, "tok/s", 10138.0, itl_ms_p50=1.5)
    results.add("load_gb_s", 13, "GB/s")
    first, second = map(json.loads, results.path.read_text().splitlines())
    assert set(first) - {"itl_ms_p50"} == FIELDS
    assert (first["value"], first["target"], first["floor"]) == (9000.1235, 8800.0, 10138.0)
    assert (second["target"], second["floor"]) == (30.0, 55.0)


def test_the_newest_line_of_a_name_counts(tmp_path) -> None:
    results = ResultFile(tmp_path / "r.jsonl")
    assert results.latest() == {}
    for value in (1.0, 2.0):
        results.add("a", value, "s")
    assert results.latest() == {"a": 2.0}


def test_the_cost_of_determinism_is_that_of_the_worst_batch(tmp_path) -> None:
    results = ResultFile(tmp_path / "r.jsonl")
    for batch, plain, exact in ((8, 1500.0, 1000.0), (256, 13000.0, 12000.0)):
        results.add(f"qwen3-8b.decode_tok_s.b{batch}", plain, "tok/s")
        results.add(f"qwen3-8b.deterministic.decode_tok_s.b{batch}", exact, "tok/s")
    add_deterministic_cost(results)
    latest = results.latest()
    assert latest["deterministic_cost_pct.b8"] == 50.0
    assert latest["deterministic_cost_pct.b256"] == pytest.approx(8.3333)
    assert latest["deterministic_cost_pct"] == 50.0


def test_a_part_that_fails_costs_only_itself(tmp_path) -> None:
    with make_session(tmp_path) as session:
        assert session.run(Part("bad", 30, [python("raise ValueError(12321)")])) == "FAILED"
        assert session.run(Part("good", 30, [python("print(45654)")])) == "passed"
    log = (tmp_path / "session.log").read_text()
    assert "12321" in log
    assert "45654" in log


def test_a_part_that_hangs_is_stopped_with_its_children(tmp_path) -> None:
    sleep = "import time; time.sleep(99)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{sleep}'])"
    began = time.monotonic()
    with make_session(tmp_path) as session:
        assert session.run(Part("slow", 1.5, [python(child)])) == "OUT OF TIME"
        assert time.monotonic() - began < 30
        assert session.run(Part("next", 30, [python("1")])) == "passed"


def test_no_part_begins_when_the_time_is_spent(tmp_path) -> None:
    with make_session(tmp_path, limit_s=2.0) as session:
        assert session.run(Part("late", 60, [python("1")])) == "not run"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_names_a_module_that_exists(tmp_path, device) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    parts = all_parts(Setting(tmp_path, device, model))
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    root = Path(__file__).resolve().parents[2]
    for module in {command[0] for part in parts for command in part.commands} - {"pytest"}:
        assert root.joinpath(*module.split(".")).with_suffix(".py").exists(), module


def test_a_model_in_pieces_is_put_together(tmp_path) -> None:
    pieces = [tmp_path / "a", tmp_path / "b"]
    for piece, data in zip(pieces, (b"12", b"345"), strict=True):
        piece.write_bytes(data)
    assert joined(tmp_path / "whole", pieces) == tmp_path / "whole"
    assert (tmp_path / "whole").read_bytes() == b"12345"
    assert joined(tmp_path / "other", []) is None
    assert joined(None, []) is None


def test_the_targets_cover_every_name_that_is_asked_for() -> None:
    models = ("qwen3-8b", "qwen3-0.6b", "smollm2-135m")
    assert {f"{model}.decode_tok_s.b{b}" for model in models for b in (1, 8, 64, 256)} <= set(
        TARGETS
    )
