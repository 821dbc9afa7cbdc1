"""Watching a whole worker as an operator does: probes, metrics, logs, and `tokenbus top`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from ops.worker_process import WorkerProcess, run_worker
from tests.redis_servers import RedisServer, find_servers
from tokenbus import AsyncClient
from tokenbus.errors import NonFinite, TooLong

FAKE = ("--model", "fake", "--set", "fake.step_ms=5")
WAIT_S = 30.0
COMMAND = (sys.executable, "-c", "from ops.cli import main; main()")
JOB = {"prompt": "ab", "max_tokens": 40, "ignore_eos": True}


@asynccontextmanager
async def fake_worker(tmp_path: Path, *arguments: str) -> AsyncIterator[WorkerProcess]:
    async with run_worker(tmp_path / "data", (*FAKE, *arguments)) as worker:
        yield worker


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def page(worker: WorkerProcess, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, worker.ready["http"] + path)


async def ready_page(worker: WorkerProcess, status: int, reason: str = "") -> None:
    """Wait until /ready answers so."""
    async with asyncio.timeout(WAIT_S):
        while True:
            got, text = await page(worker, "/ready")
            if got == status and reason in json.loads(text)["reason"]:
                return
            await asyncio.sleep(0.02)


async def metrics(worker: WorkerProcess) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and label values, these in the order of the labels; without buckets."""
    _, text = await page(worker, "/metrics")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix("tokenbus_")
                found.setdefault(name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def metric(worker: WorkerProcess, name: str, labels: tuple[str, ...], value: float) -> None:
    """Wait until a metric has this value: some are looked up every half second."""
    async with asyncio.timeout(WAIT_S):
        while (await metrics(worker)).get(name, {}).get(labels) != value:
            await asyncio.sleep(0.05)


async def run_jobs(client: AsyncClient, count: int, **fields: Any) -> None:
    async def one() -> None:
        async for _ in client.generate(**(JOB | fields)):
            pass

    await asyncio.gather(*(one() for _ in range(count)))


def log_lines(worker: WorkerProcess, event: str) -> list[Mapping[str, Any]]:
    lines = [json.loads(line) for line in worker.log_file.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


async def test_what_a_scrape_says_adds_up(tmp_path: Path) -> None:
    slow = ("--set", "fake.step_ms=60")  # so that all 20 are seen running at once
    async with (
        fake_worker(tmp_path, *slow) as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        load = asyncio.gather(run_jobs(over_zmq, 12), run_jobs(over_redis, 8))
        await metric(worker, "running_jobs", (), 20)
        assert (await page(worker, "/ready"))[0] == 200
        await load
        for client, door in ((over_zmq, "zmq"), (over_redis, "redis")):
            with pytest.raises(TooLong):
                await run_jobs(client, 1, prompt="a" * 5_000)
            await metric(worker, "refused_total", ("too_long", door), 1)
        await metric(worker, "running_jobs", (), 0)
        found = await metrics(worker)
        assert found["jobs_total"] == {("zmq", "length"): 12, ("redis", "length"): 8}
        assert found["ttft_seconds_count"] == {("zmq",): 12, ("redis",): 8}
        assert found["job_seconds_count"] == {("zmq",): 12, ("redis",): 8}
        assert found["output_tokens_total"][()] == 20 * 40
        assert found["inter_token_seconds_count"][()] == 20 * 39
        mean_gap_s = found["inter_token_seconds_sum"][()] / (20 * 39)
        assert 0.005 <= mean_gap_s < 0.5
        assert found["prompt_tokens_total"][()] == 20 * 2
        assert found["step_rows_sum"][()] == 20 * 40
        assert found["redis_up"][()] == found["ready"][()] == 1
        assert found["phase_seconds_total"][("launch",)] > 0
        assert (await page(worker, "/live"))[0] == 200
        assert (await page(worker, "/nothing"))[0] == 404


async def test_ready_ends_with_the_engine_and_comes_back(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path) as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as client,
    ):
        job = asyncio.create_task(run_jobs(client, 1, max_tokens=200))
        await metric(worker, "running_jobs", (), 1)
        os.kill(worker.pids["engine"], signal.SIGKILL)
        await ready_page(worker, 503, "engine: the engine is gone")
        assert (await page(worker, "/live"))[0] == 200
        await ready_page(worker, 200)
        await job
        found = await metrics(worker)
        assert found["engine_losses_total"][()] == found["engine_restarts_total"][()] == 1
        assert found["jobs_total"] == {("zmq", "length"): 1}


async def test_ready_ends_with_redis_and_comes_back(tmp_path: Path) -> None:
    server = RedisServer(find_servers()[-1], tcp=True, aof=True).start()
    try:
        async with fake_worker(tmp_path, "--redis", server.url) as worker:
            server.kill()
            await ready_page(worker, 503, "redis: ")
            await metric(worker, "redis_up", (), 0)
            server.start()
            await ready_page(worker, 200)
            await metric(worker, "redis_up", (), 1)
            assert (await metrics(worker))["redis_reconnects_total"][()] == 1
    finally:
        server.close()


async def test_a_drain_is_not_ready_while_jobs_finish(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path) as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as client,
    ):
        job = asyncio.create_task(run_jobs(client, 1, max_tokens=300))
        await metric(worker, "running_jobs", (), 1)
        worker.process.send_signal(signal.SIGTERM)
        await ready_page(worker, 503, "draining")
        await job


async def test_the_backlog_in_redis_is_seen_with_its_age_and_the_pages_keep_their_port(
    tmp_path: Path,
) -> None:
    server = RedisServer(find_servers()[-1], tcp=True, aof=True).start()
    arguments = ("--redis", server.url, "--set", "engine.max_num_seqs=1")
    try:
        async with (
            fake_worker(tmp_path, *arguments, "--set", "fake.step_ms=50") as worker,
            Redis.from_url(server.url, protocol=2) as redis,
        ):
            fields = {"prompt": "ab", "max_tokens": "400", "ignore_eos": "true"}
            for _ in range(9):
                await redis.xadd("tokenbus:{default}:jobs", fields)
            await redis.xadd("tokenbus:{default}:jobs:low", fields)
            async with asyncio.timeout(WAIT_S):
                while True:
                    found = await metrics(worker)
                    waiting = found.get("backlog_jobs", {})
                    if waiting.get(("low",)) and found["backlog_oldest_seconds"][()] > 1:
                        break
                    await asyncio.sleep(0.1)
            held = found["running_jobs"][()] + sum(found["queue_jobs"].values())
            assert sum(waiting.values()) + held == 10
            before = worker.ready["http"]
            os.kill(worker.pids["broker"], signal.SIGKILL)
            assert (await worker.next_event())["http"] == before
            await ready_page(worker, 200)
            os.kill(worker.pids["supervisor"], signal.SIGKILL)  # 400 tokens take too long
    finally:
        server.close()


async def test_http_none_closes_the_pages(tmp_path: Path) -> None:
    async with fake_worker(tmp_path, "--http", "none") as worker:
        assert worker.ready["http"] == ""


SECRET = "xylophone-7391"


async def test_no_text_of_a_job_and_no_password_is_in_the_log(tmp_path: Path) -> None:
    server = RedisServer(find_servers()[-1], tcp=True, extra=("--requirepass", "hunter2"))
    url = f"redis://:hunter2@127.0.0.1:{server.port}"
    server.client = lambda **options: _with_password(url)  # type: ignore[method-assign]
    server.start()
    try:
        async with (
            fake_worker(tmp_path, "--redis", url, "--log-level", "debug") as worker,
            AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
            AsyncClient(redis=url) as over_redis,
            Redis.from_url(url, protocol=2) as redis,
        ):
            for client in (over_zmq, over_redis):
                await run_jobs(client, 1, prompt=SECRET, stop=[SECRET])
            bad = {"prompt": SECRET, "temperature": SECRET, "job": "bad"}
            await redis.xadd("tokenbus:{default}:jobs", bad)
            await send_bad_frame(worker.ready["zmq"])
            async with asyncio.timeout(WAIT_S):
                while not (log_lines(worker, "job.rejected") and log_lines(worker, "frame.bad")):
                    await asyncio.sleep(0.05)
        text = worker.log_file.read_text()
        assert len(log_lines(worker, "job.finished")) == 2
        assert SECRET not in text
        assert "hunter2" not in text
    finally:
        server.kill()
        server.close()


def _with_password(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url, decode_responses=True)


async def send_bad_frame(endpoint: str) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    socket.connect(endpoint)
    await socket.send_multipart([b"TB", SECRET.encode(), SECRET.encode()])
    await asyncio.wait_for(socket.recv_multipart(), WAIT_S)
    context.destroy(linger=0)


async def test_each_job_writes_one_line_at_its_end(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path, "--set", f"fake.nan_token={ord('~')}") as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as client,
    ):
        await run_jobs(client, 3)
        stream = client.generate("ab", max_tokens=4_000, ignore_eos=True)
        async for _ in stream:
            await client.cancel(stream.job)
        with pytest.raises(NonFinite):
            await run_jobs(client, 1, prompt="a ~ b")
    [failed] = log_lines(worker, "job.failed")
    assert (failed["reason"], failed["level"]) == ("non_finite", "warning")
    assert failed.keys() > {"job", "door", "attempt", "prompt_tokens", "total_ms", "error"}
    ends = log_lines(worker, "job.finished")
    assert sorted(line["reason"] for line in ends) == ["cancelled", *["length"] * 3]
    for line in ends:
        assert line["door"] == "zmq"
        assert line["prompt_tokens"] == 2
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    lengths: Sequence[int] = [e["completion_tokens"] for e in ends if e["reason"] == "length"]
    assert lengths == [40] * 3
    assert all(20 < line["tok_s"] < 250 for line in ends if line["reason"] == "length")


async def cli(*arguments: str) -> tuple[int, str]:
    """A `tokenbus` command; its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(),
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}


async def test_top_shows_a_worker_under_load_over_both_doors(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path, "--set", "engine.max_num_seqs=4", "--drain-s", "0") as worker,
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        over_both = (run_jobs(over_zmq, 6, max_tokens=4_000), run_jobs(over_redis, 6, max_tokens=9))
        load = [asyncio.create_task(jobs) for jobs in over_both]
        await metric(worker, "queue_jobs", ("high",), 0)
        for address in (("--redis", worker.ready["redis"]), ("--zmq", worker.ready["zmq"])):
            facts = await top_under_load(address)
            [line] = facts["workers"]
            assert (line["worker"], line["model"]) == (worker.ready["worker"], "fake")
            assert line["state"] == "ready"
            assert facts["running"] == line["running"] == line["max_running"] == 4
            assert facts["itl_ms"] >= 5
            assert 0 < line["used_blocks"] < line["total_blocks"]
        code, output = await cli("top", "--once", "--data-dir", str(worker.log_file.parent))
        assert code == 0
        assert "1 of 1 workers ready" in output
        assert "running 4 of 4 rows" in output
        assert "q quits" not in output
        await watch_in_terminal("--zmq", worker.ready["zmq"])
        for task in load:
            task.cancel()


async def top_under_load(address: tuple[str, str]) -> dict[str, Any]:
    """What `top --json` says once its rates, which are means over seconds, have seen the load."""
    async with asyncio.timeout(WAIT_S):
        while True:
            code, output = await cli("top", "--json", *address)
            assert code == 0, output
            facts: dict[str, Any] = json.loads(output)
            if facts["tokens_s"] > 20:
                return facts


async def watch_in_terminal(*arguments: str) -> None:
    """On a terminal of 80x24: pictures come, q ends it, and the terminal is as it was."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "top", "--every", "0.1", *arguments),
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment(),
    )  # fmt: skip
    shown = b""
    async with asyncio.timeout(WAIT_S):
        while shown.count(b"tok/s") < 6:  # two of them a picture
            shown += await asyncio.to_thread(os.read, ours, 4096)
        os.write(ours, b"q")
        while b"\x1b[?1049l" not in shown:  # back from the alternate screen
            shown += await asyncio.to_thread(os.read, ours, 4096)
        assert await process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    assert b"q quits" in shown
    os.close(ours)
    os.close(theirs)


async def test_top_without_a_bus_says_so(tmp_path: Path) -> None:
    code, output = await cli("top", "--json", "--redis", "redis://127.0.0.1:1/0")
    assert code == 5
    assert "redis://127.0.0.1:1/0" in json.loads(output)["error"]
    code, output = await cli("top", "--once", "--zmq", f"ipc://{tmp_path}/nobody")
    assert code == 5
    assert "no worker answers" in output
