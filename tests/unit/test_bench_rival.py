"""The benchmark of transformers' generate_batch: rates from times, and what its config is told."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from bench.gpu_rival import (
    Figures,
    Setting,
    Work,
    config_fields,
    figures,
    known_fields,
    measure_all,
    parse_setting,
    report,
)
from bench.report import ResultFile


def steps(first: float, count: int, lag: float = 0.0) -> list[float]:
    """Times of `count` tokens one second apart, the first `lag` after its step's."""
    return [first + i + lag for i in range(count)]


def test_the_last_step_counts_whole() -> None:
    """Tokens of one step get their times in turn; the first request to end does not cut them."""
    found = figures([0.0, 0.5], [steps(1, 5), steps(1, 5, lag=0.01)])
    assert found.decode_tok_s == pytest.approx(2 * 4 / 4.0, rel=0.01)
    assert found.run_s == pytest.approx(5.01)
    assert found.run_tok_s == pytest.approx(10 / 5.01)


def test_the_window_is_where_all_requests_decode() -> None:
    """A request admitted two steps late: only the steps that both share count."""
    found = figures([0.0, 0.0], [steps(1, 6), steps(3, 6)])
    assert found.decode_tok_s == pytest.approx(2 * 3 / 3.0)


def test_requests_after_one_another_have_no_window() -> None:
    found = figures([0.0, 0.0], [steps(1, 3), steps(4, 3)])
    assert found.decode_tok_s is None
    assert found.run_tok_s == pytest.approx(1.0)


def test_settings_are_named_as_they_print() -> None:
    for text in ("sdpa", "eager+graphs", "flash_attention_2+graphs"):
        assert str(parse_setting(text)) == text


@pytest.mark.parametrize("text", ["flash", "sdpa+", "sdpa+compile", ""])
def test_an_unknown_setting_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="take one of"):
        parse_setting(text)


def test_admission_and_pages_hold_no_request_back() -> None:
    work = Work(batch=64, input_len=1024, output_len=64)
    fields = config_fields(Setting("sdpa", True), work)
    assert fields["safety_margin"] == 0.0
    assert fields["num_blocks"] * fields["page_size"] >= 64 * (1024 + 64 + 256)
    assert fields["max_requests_per_batch"] == 64
    assert not fields["allow_block_sharing"]
    # Decode steps of this work read 65536 to 69632 cached tokens: one interval, one graph.
    assert fields["kv_padding_interval_size"] == 4096
    assert config_fields(Setting("eager", False), work)["kv_padding_interval_size"] == 0


def test_each_version_gets_the_fields_it_has() -> None:
    old = dataclasses.make_dataclass("Old", [("block_size", int), ("num_blocks", int)])
    new = dataclasses.make_dataclass("New", [("page_size", int), ("block_size", int)])
    fields = {"page_size": 256, "block_size": 256, "num_blocks": 9, "safety_margin": 0.0}
    assert known_fields(old, fields) == {"block_size": 256, "num_blocks": 9}
    assert known_fields(new, fields) == {"page_size": 256}


def test_a_line_has_the_best_setting_of_its_figure(tmp_path) -> None:
    pytest.importorskip("transformers")
    results = ResultFile(tmp_path / "r.jsonl")
    found = {"sdpa": Figures(100.0, 90.0, 1.0), "eager+graphs": Figures(None, 95.0, 2.0)}
    report(results, "tiny", Work(8, 32, 8), found)
    decode, run = map(json.loads, results.path.read_text().splitlines())
    assert (decode["what"], decode["value"]) == ("tiny.generate_batch.decode_tok_s.b8", 100.0)
    assert decode["setting"] == "sdpa"
    assert (run["what"], run["value"]) == ("tiny.generate_batch.run_tok_s.b8", 95.0)
    assert run["settings"] == {"sdpa": 90.0, "eager+graphs": 95.0}
    assert "decode_tok_s" not in run


def test_without_a_window_there_is_no_decode_line(tmp_path) -> None:
    pytest.importorskip("transformers")
    results = ResultFile(tmp_path / "r.jsonl")
    report(results, "tiny", Work(8, 32, 8), {"sdpa": Figures(None, 90.0, 1.0)})
    assert list(results.latest()) == ["tiny.generate_batch.run_tok_s.b8"]


def test_a_setting_that_fails_leaves_the_others(monkeypatch, capsys) -> None:
    def measure(_model: object, setting: Setting, _work: Work) -> Figures:
        if setting.graphs:
            raise RuntimeError("no memory left\nwith a long story")
        return Figures(1.0, 1.0, 1.0)

    monkeypatch.setattr("bench.gpu_rival.measure", measure)
    settings = [Setting("sdpa", True), Setting("sdpa", False)]
    assert list(measure_all(None, settings, Work(8, 32, 8))) == ["sdpa"]
    assert "b8 sdpa+graphs: failed: RuntimeError: no memory left\n" in capsys.readouterr().out
