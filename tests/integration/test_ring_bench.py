"""The ring benchmark measures every channel and prints what it promises."""

from __future__ import annotations

import json

import pytest

from ops.bench import ring


def test_every_channel_is_measured_and_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ring.main(["--seconds", "0.4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for channel in ring.CHANNELS:
        assert 0 < result[f"{channel}.rtt_us.p50"] <= result[f"{channel}.rtt_us.p99"]
        assert 0 < result[f"{channel}.one_way_us.p50"] <= result[f"{channel}.one_way_us.p99"]
        assert result[f"{channel}.records_per_s"] > 0
