"""The Redis users of docs/OPERATIONS.md: enough for workers and applications, and no more."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from ops.worker_process import WorkerProcess, run_worker
from tests.docs_kit import ROOT, blocks_of
from tests.redis_servers import RedisServer, find_servers
from tokenbus import AsyncClient
from tokenbus.events import crc32_of_ids

BY_KEY = [binary for binary in find_servers() if not binary.version.startswith("6.")]
OLDEST_AND_NEWEST = (*find_servers()[:1], *find_servers()[1:][-1:])
JOBS = "tokenbus:{default}:jobs"


def acl_of(user: str) -> list[str]:
    """The words after `redis-cli` of the block that makes this user."""
    for block in blocks_of("docs/OPERATIONS.md"):
        words = shlex.split(block.text.replace("\\\n", " "), comments=True)
        if words[:4] == ["redis-cli", "ACL", "SETUSER", user]:
            return words[1:]
    raise LookupError(user)


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{user}-password@127.0.0.1:{server.port}"


@pytest.fixture(params=OLDEST_AND_NEWEST, ids=lambda binary: binary.short_version)
def server(request: pytest.FixtureRequest) -> RedisServer:
    server = RedisServer(request.param, tcp=True).start()
    with server.client() as admin:
        admin.execute_command(*acl_of("worker"))
        if not server.is_6:
            admin.execute_command(*acl_of("app"))
        admin.acl_log_reset()
    return server


def refused(server: RedisServer) -> list[str]:
    """What Redis has refused to anybody. redis-py tells Redis 7.2 its name, and may do without."""
    with server.client() as admin:
        entries = [f"{entry['username']}: {entry['object']}" for entry in admin.acl_log()]
    return [entry for entry in entries if entry != "app: client|setinfo"]


async def run_job(client: AsyncClient, victim: WorkerProcess | None = None) -> None:
    """A job that loses its whole worker on the way, if one is given."""
    stream = client.generate("ab", max_tokens=120, ignore_eos=True)
    ids: list[int] = []
    async for tokens in stream:
        ids += tokens.ids
        if victim is not None and len(ids) >= 10:
            for pid in victim.pids.values():
                os.kill(pid, signal.SIGKILL)
            victim = None
    assert stream.done is not None
    assert len(ids) == 120
    assert stream.done.crc == crc32_of_ids(ids)


async def cancel_a_job(client: AsyncClient) -> None:
    """Submit one, cancel it after its first tokens, read it to its end."""
    job = await client.submit("ab", max_tokens=5_000, ignore_eos=True)
    async for tokens in client.tail(job):
        running = await client.status(job)
        assert running.state == "running"
        assert running.seq >= tokens.seq
        await client.cancel(job)
        break
    stream = client.tail(job)
    async for _ in stream:
        pass
    status = await client.status(job)
    assert status.state == "done"
    assert stream.done is not None
    assert status.seq == stream.done.usage.completion_tokens


async def test_a_worker_needs_no_more_than_its_user_may(
    server: RedisServer, tmp_path: Path
) -> None:
    """Jobs, a cancel, a drain, and a worker that is killed and whose job another takes over."""
    flags = ("--model", "fake", "--set", "fake.step_ms=10", "--set", "streams.lease_ms=1500")
    flags += ("--set", "streams.renew_ms=300", "--redis", url_of(server, "worker"))
    app = server.url if server.is_6 else url_of(server, "app")
    try:
        async with (
            AsyncClient(redis=app) as client,
            run_worker(tmp_path / "1", flags) as first,
        ):
            async with run_worker(tmp_path / "2", (*flags, "--zmq", "none")) as second:
                assert await second.stop() == 0  # a drain
            async with AsyncClient(zmq=first.ready["zmq"]) as over_zmq:
                durable = over_zmq.generate("ab", max_tokens=8, durable=True)
                assert [tokens async for tokens in durable]
            await cancel_a_job(client)
            async with run_worker(tmp_path / "3", (*flags, "--zmq", "none")):
                await run_job(client, victim=first)
        assert refused(server) == []
    finally:
        server.close()


@pytest.mark.skipif(not BY_KEY, reason="needs Redis 7.0 or later")
@pytest.mark.parametrize(
    "command",
    [
        ("XADD", "tokenbus:{default}:out:another-job", "9-9", "event", "done"),
        ("XRANGE", JOBS, "-", "+"),
        ("XREAD", "STREAMS", JOBS, "0"),
        ("DEL", JOBS),
        ("XTRIM", JOBS, "MAXLEN", "0"),
        ("XADD", "tokenbus:{another}:jobs", "*", "prompt", "x"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("EVAL", "return 1", "0"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_application_can_neither_forge_nor_spy(command: tuple[str, ...]) -> None:
    server = RedisServer(BY_KEY[-1], tcp=True).start()
    try:
        with server.client() as admin:
            admin.execute_command(*acl_of("app"))
        with redis.Redis.from_url(url_of(server, "app")) as app:
            with pytest.raises(NoPermissionError):
                app.execute_command(*command)
            app.execute_command("XADD", JOBS, "*", "prompt", "Hello")
    finally:
        server.close()


def test_every_command_of_the_scripts_is_in_the_workers_list() -> None:
    allowed = {word[1:].split("|")[0] for word in acl_of("worker") if word.startswith("+")}
    called = set()
    for script in (ROOT / "broker" / "streams" / "lua").glob("*.lua"):
        called |= set(re.findall(r"(?:call\(|args = \{ )'([A-Z]+)'", script.read_text()))
    assert {command.lower() for command in called} <= allowed
