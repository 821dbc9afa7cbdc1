"""The embedded Redis, with a real server: flags, ports, orphans, two workers on one directory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from ops import embedded_redis, worker_files
from ops.embedded_redis import RedisPlan
from ops.exit_codes import CommandError


@contextmanager
def running(plan: RedisPlan) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(plan.argv)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def test_it_never_evicts_keeps_an_append_only_file_and_listens_on_loopback(
    tmp_path: Path,
) -> None:
    plan = embedded_redis.plan(tmp_path)
    with running(plan):
        await embedded_redis.wait_ready(plan)
        with Redis.from_url(plan.url, decode_responses=True) as redis:
            found = {
                name: redis.config_get(name)[name]  # type: ignore[index]
                for name in ("maxmemory-policy", "appendonly", "bind", "dir")
            }
    assert found == {
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "bind": "127.0.0.1",
        "dir": str(tmp_path / "redis"),
    }


async def test_jobs_are_there_again_after_a_restart_under_the_same_address(tmp_path: Path) -> None:
    first = embedded_redis.plan(tmp_path)
    with running(first):
        await embedded_redis.wait_ready(first)
        with Redis.from_url(first.url) as redis:
            entry = redis.xadd("tokenbus:{default}:jobs", {"prompt": "x"})
    second = embedded_redis.plan(tmp_path)
    assert second.url == first.url
    with running(second):
        await embedded_redis.wait_ready(second)
        with Redis.from_url(second.url) as redis:
            assert [i for i, _ in redis.xrange("tokenbus:{default}:jobs")] == [entry]  # type: ignore[union-attr]


async def test_a_server_left_by_a_dead_worker_is_stopped(tmp_path: Path) -> None:
    plan = embedded_redis.plan(tmp_path)
    with running(plan) as process:
        await embedded_redis.wait_ready(plan)
        assert embedded_redis.stop_orphan(plan.directory)
        assert process.wait(10) == 0


def test_a_stale_pid_file_harms_nobody(tmp_path: Path) -> None:
    """The pid may belong to any other program by now."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (tmp_path / "redis.pid").write_text(f"{bystander.pid}\n")
        assert not embedded_redis.stop_orphan(tmp_path)
        assert bystander.poll() is None
        bystander.kill()


async def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    plan = embedded_redis.plan(tmp_path)
    broken = tmp_path / "redis" / "appendonly.aof"
    broken.write_text("this is not an append-only file\n" * 10)
    with running(plan), pytest.raises(CommandError, match="Bad file format"):
        await embedded_redis.wait_ready(plan, timeout_s=3)


def test_two_workers_cannot_share_a_data_directory(tmp_path: Path) -> None:
    with (
        worker_files.data_lock(tmp_path),
        pytest.raises(CommandError, match="another worker") as caught,
        worker_files.data_lock(tmp_path),
    ):
        pass
    assert "--data-dir" in caught.value.remedy


def test_workers_announce_themselves_until_they_are_gone(tmp_path: Path) -> None:
    import os

    pids = {"supervisor": os.getpid(), "broker": 1, "engine": 2}
    announcement = worker_files.Announcement("tcp://h:1", "", "default", "m", "w", pids)
    worker_files.announce(tmp_path, announcement)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    dead = {**pids, "supervisor": gone.pid}
    worker_files.announce(
        tmp_path, worker_files.Announcement("tcp://h:2", "", "default", "m", "v", dead)
    )
    assert worker_files.find_workers(tmp_path, "default") == [announcement]
    assert worker_files.find_workers(tmp_path, "other") == []
    worker_files.withdraw(tmp_path)
    assert worker_files.find_workers(tmp_path) == []
    assert list((tmp_path / "workers").iterdir()) == []
