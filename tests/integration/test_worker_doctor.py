"""`tokenbus doctor` on a machine with things to mend."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from redis import Redis

from ops import embedded_redis
from ops.doctor import Finding, Level, examine
from ops.settings import load


def findings(what: str, **flags: object) -> list[Finding]:
    return [finding for finding in examine(load(flags)) if finding.what == what]


async def test_a_redis_that_drops_jobs_is_bad_and_the_remedy_is_a_command(tmp_path: Path) -> None:
    plan = embedded_redis.plan(tmp_path)
    with subprocess.Popen(plan.argv) as process:
        try:
            await embedded_redis.wait_ready(plan)
            sound = findings("redis", redis=plan.url)
            with Redis.from_url(plan.url) as redis:
                redis.config_set("maxmemory-policy", "allkeys-lru")
                redis.config_set("appendonly", "no")
            ailing = findings("redis", redis=plan.url)
        finally:
            process.terminate()
    assert [finding.level for finding in sound] == [Level.GOOD] * 3
    assert [finding.level for finding in ailing] == [Level.GOOD, Level.BAD, Level.NOTE]
    assert "allkeys-lru" in ailing[1].text
    assert "CONFIG SET maxmemory-policy noeviction" in ailing[1].remedy


def test_a_redis_that_is_not_there_is_bad_and_its_password_is_not_shown() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://:hunter2@127.0.0.1:{closed.getsockname()[1]}/0"
        found = findings("redis", redis=url)
    assert [finding.level for finding in found] == [Level.BAD]
    assert "hunter2" not in repr(found)
    assert found[0].remedy


def test_a_taken_port_is_bad() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = findings("zmq", zmq=f"tcp://{address}") + findings("http", http=address)
    assert [finding.level for finding in found] == [Level.BAD, Level.BAD]
    assert all(address in finding.text for finding in found)
    assert [finding.level for finding in findings("http")] == [Level.GOOD]


def test_an_incomplete_model_directory_is_bad(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = findings("model", model=str(tmp_path))
    assert [finding.level for finding in found] == [Level.BAD]
    assert "tokenizer.json" in found[0].text


def test_a_gpu_that_is_asked_for_and_not_there_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [finding.level for finding in findings("gpu", device="cuda")] == [Level.BAD]
    assert [finding.level for finding in findings("gpu")] == [Level.NOTE]


def test_every_bad_finding_has_a_remedy(tmp_path: Path) -> None:
    found = examine(load({"redis": "redis://127.0.0.1:1/0", "model": str(tmp_path)}))
    assert [finding for finding in found if finding.level is Level.BAD and not finding.remedy] == []
