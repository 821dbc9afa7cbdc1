"""Settings: precedence, messages, secrets, and agreement with what the processes get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerConfig, QueueConfig, RedisConfig, ZmqConfig
from broker.streams.address import parse_redis_url
from engine.config import EngineConfig, FakeModel
from ops.exit_codes import CommandError, ExitCode
from ops.models import ResolvedModel
from ops.settings import (
    Settings,
    broker_config,
    engine_config,
    load,
    public_url,
    unknown_variables,
)
from ops.settings_sections import (
    EngineSettings,
    FakeSettings,
    GatewaySettings,
    LimitsSettings,
    StreamsSettings,
)

MODEL = ResolvedModel(Path("/models/m.gguf"), "m")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no tokenbus.toml of the machine that runs the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("TOKENBUS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_flag_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokenbus.toml").write_text(
        'queue = "file"\nmodel = "file"\ndevice = "cpu"\n'
        "[engine]\nmax_num_seqs = 1\nnum_threads = 1\n"
    )
    monkeypatch.setenv("TOKENBUS_QUEUE", "environment")
    monkeypatch.setenv("TOKENBUS_MODEL", "environment")
    monkeypatch.setenv("TOKENBUS_ENGINE__NUM_THREADS", "2")
    settings = load({"queue": "flag", "model": None})
    assert (settings.queue, settings.model, settings.device) == ("flag", "environment", "cpu")
    assert (settings.engine.max_num_seqs, settings.engine.num_threads) == (1, 2)
    assert settings.zmq == "tcp://127.0.0.1:5555"


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({"drain_s": "soon"}, {}, "drain_s = 'soon' (flag --drain-s)"),
        ({"queue": "a{b}"}, {}, "queue = 'a{b}' (flag --queue): use 1 to 64 letters"),
        ({"zmq": "localhost:5555"}, {}, "zmq = 'localhost:5555' (flag --zmq): use tcp://"),
        ({"engine": {"dtype": "int3"}}, {}, "engine.dtype = 'int3' (flag --set)"),
        ({"engine": {"max_num_sex": "1"}}, {}, "engine.max_num_sex (flag --set) is not a setting"),
        ({}, {"STREAMS__LEASE_MS": "5"}, "(environment TOKENBUS_STREAMS__LEASE_MS): Input should"),
    ],
)
def test_a_bad_value_names_key_value_and_source(
    monkeypatch: pytest.MonkeyPatch,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    expected: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"TOKENBUS_{name}", value)
    with pytest.raises(CommandError) as caught:
        load(flags)
    assert caught.value.code is ExitCode.BAD_SETTING
    assert expected in caught.value.message
    assert caught.value.remedy


def test_a_bad_redis_url_is_not_repeated_in_the_message() -> None:
    with pytest.raises(CommandError) as caught:
        load({"redis": "http://user:hunter2@host"})
    assert "hunter2" not in caught.value.message
    assert "flag --redis" in caught.value.message


@pytest.mark.parametrize(
    "url", ["rediss://h", "unix:///r.sock", "redis+sentinel://a,b/main", "rediss+cluster://a:7000"]
)
def test_every_form_of_redis_url_that_the_broker_knows_can_be_set(url: str) -> None:
    assert load({"redis": url}).redis_mode == "url"
    assert parse_redis_url(url)


def test_the_redis_url_does_not_show_in_the_repr() -> None:
    assert "hunter2" not in repr(load({"redis": "redis://:hunter2@host/0"}))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:pw@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:pw@host", "rediss://user:***@host"),
    ],
)
def test_public_url_hides_the_password(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_a_settings_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no settings file"):
        load({}, tmp_path / "absent.toml")


def test_a_settings_file_that_is_not_toml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("queue = 'a'\nmodel\n")
    with pytest.raises(CommandError, match=r"bad\.toml is not TOML: .*line 2"):
        load({}, file)


def test_variables_that_set_nothing_are_found() -> None:
    environment = {"TOKENBUS_QUEU": "x", "TOKENBUS_QUEUE": "x", "TOKENBUS_CACHE": "x", "PATH": "x"}
    assert unknown_variables(environment) == ["TOKENBUS_QUEU"]


@pytest.mark.parametrize(
    ("section", "config", "set_elsewhere"),
    [
        (StreamsSettings, RedisConfig, {"url"}),
        (GatewaySettings, ZmqConfig, {"endpoint"}),
        (LimitsSettings, QueueConfig, set()),
        (EngineSettings, EngineConfig, {"model_path", "model_name", "device", "fake"}),
        # How a runner computes, for tests of the scheduler.
        (FakeSettings, FakeModel, {"chunk_align_tokens", "replays_by_decode"}),
    ],
)
def test_sections_have_the_fields_and_defaults_of_the_configurations(
    section: Any, config: Any, set_elsewhere: set[str]
) -> None:
    expected = {
        field.name: field.default for field in fields(config) if field.name not in set_elsewhere
    }
    assert MISSING not in expected.values()
    assert section().model_dump() == expected


def test_every_default_of_the_broker_can_be_set() -> None:
    """What the broker's configuration has a default for has the same one here."""
    broker = broker_config(
        load({"redis": "none", "zmq": "none"}),
        MODEL,
        worker="w",
        link_path=Path("/l"),
        redis_url="",
    )
    defaults = {f.name: f.default for f in fields(BrokerConfig) if f.default is not MISSING}
    assert {name: getattr(broker, name) for name in defaults} == defaults
    flags = {"ring_bytes": 1 << 20, "engine_hang_ms": 2000, "drain_s": 3}
    changed = broker_config(load(flags), MODEL, worker="w", link_path=Path("/l"), redis_url="")
    assert (changed.ring_bytes, changed.engine_hang_ms, changed.drain_ms) == (1 << 20, 2000, 3000)


def test_every_setting_says_what_it_is() -> None:
    sections = (StreamsSettings, GatewaySettings, LimitsSettings, EngineSettings, FakeSettings)
    undescribed = [
        f"{model.__name__}.{name}"
        for model in (Settings, *sections)
        for name, field in model.model_fields.items()
        if not field.description and not isinstance(field.annotation, type(EngineSettings))
    ]
    assert undescribed == []


def test_the_configurations_survive_the_way_to_their_process() -> None:
    settings = load({"engine": {"max_num_seqs": 3}, "streams": {"lease_ms": 2000}, "drain_s": 1.5})
    broker = broker_config(
        settings, MODEL, worker="w", link_path=Path("/l"), redis_url="redis://h/0"
    )
    engine = engine_config(settings, MODEL)
    assert BrokerConfig.from_json(broker.to_json()) == broker
    assert EngineConfig.from_json(engine.to_json()) == engine
    assert (broker.drain_ms, engine.max_num_seqs) == (1500, 3)
    assert broker.redis == RedisConfig(url="redis://h/0", lease_ms=2000)


def test_closed_doors_have_no_configuration() -> None:
    settings = load({"zmq": "none", "redis": "none"})
    broker = broker_config(settings, MODEL, worker="w", link_path=Path("/l"), redis_url="")
    assert (broker.zmq, broker.redis) == (None, None)


def test_the_fake_model_is_fake_on_both_sides() -> None:
    settings = load({"model": "fake", "fake": {"vocab_size": "64", "step_ms": 2}})
    broker = broker_config(settings, MODEL, worker="w", link_path=Path("/l"), redis_url="")
    assert broker.fake_vocab_size == 64
    assert engine_config(settings, MODEL).fake == FakeModel(vocab_size=64, step_ms=2.0)
