"""A whole worker as a user runs it: `tokenbus serve`, both doors, the command line, and its deaths.

The fake model stands in where only the bus is looked at; its step time makes streams long enough to
be interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from ops.exit_codes import ExitCode
from ops.worker_process import WorkerFailed, WorkerProcess, run_worker
from tests.chaos.kit.processes import is_alive
from tests.redis_servers import RedisServer
from tokenbus import AsyncClient
from tokenbus.events import crc32_of_ids

FAKE = ("--model", "fake")
SLOW = (*FAKE, "--set", "fake.step_ms=10", "--set", "streams.lease_ms=1500")
NUM_TOKENS = 100


@asynccontextmanager
async def fake_worker(
    tmp_path: Path, arguments: Sequence[str] = FAKE
) -> AsyncIterator[WorkerProcess]:
    async with run_worker(tmp_path / "data", arguments) as worker:
        yield worker


def door_of(worker: WorkerProcess, name: str) -> dict[str, Any]:
    if name == "zmq":
        return {"zmq": worker.ready["zmq"]}
    return {"redis": worker.ready["redis"], "queue": worker.ready["queue"]}


async def tokenbus(worker: WorkerProcess, *arguments: str, stdin: str = "") -> tuple[int, str]:
    """Run a client command against the worker's data directory; its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from ops.cli import main; main()",
        *arguments,
        "--data-dir",
        str(worker.log_file.parent),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    output, _ = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def ended(pids: Sequence[int]) -> None:
    """Until none of these processes is alive."""
    async with asyncio.timeout(20):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def stream_through(worker: WorkerProcess, door: str, victim: str) -> list[int]:
    """A job whose worker loses a process in mid-stream; its ids, checked for holes and repeats."""
    async with AsyncClient(**door_of(worker, door)) as client:
        stream = client.generate("ab", max_tokens=NUM_TOKENS, ignore_eos=True)
        ids: list[int] = []
        async for tokens in stream:
            assert tokens.seq == len(ids) + 1 or not tokens.ids
            ids += tokens.ids
            if victim and len(ids) >= 10:
                os.kill(worker.pids[victim], signal.SIGKILL)
                victim = ""
        assert stream.done is not None
        assert stream.done.crc == crc32_of_ids(ids)
        return ids


async def test_both_doors_give_the_same_tokens(tmp_path: Path) -> None:
    async with fake_worker(tmp_path) as worker:
        over_zmq = await stream_through(worker, "zmq", "")
        over_redis = await stream_through(worker, "redis", "")
    assert len(over_zmq) == NUM_TOKENS
    assert over_redis == over_zmq


async def test_a_stranger_needs_two_redis_commands(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path) as worker,
        Redis.from_url(worker.ready["redis"], decode_responses=True, protocol=2) as redis,
    ):
        job = await redis.xadd("tokenbus:{default}:jobs", {"prompt": "Hello", "max_tokens": "16"})
        events: list[tuple[str, dict[str, str]]] = []
        last = "0"
        while not events or events[-1][1]["event"] != "done":
            reply = await redis.xread({f"tokenbus:{{default}}:out:{job}": last}, block=5000)
            assert reply, "no answer"
            events += reply[0][1]
            last = events[-1][0]
    assert events[0][0] == "1-0"
    assert events[0][1]["event"] == "started"
    assert [fields["event"] for _, fields in events].count("done") == 1
    ids = [i for _, fields in events for i in json.loads(fields.get("ids", "[]"))]
    assert len(ids) == 16
    assert int(events[-1][1]["crc"]) == crc32_of_ids(ids)


@pytest.mark.parametrize("door", ["zmq", "redis"])
async def test_kill_9_of_the_engine_is_a_pause_for_the_client(tmp_path: Path, door: str) -> None:
    async with fake_worker(tmp_path, SLOW) as worker:
        before = worker.pids
        undisturbed = await stream_through(worker, door, "")
        disturbed = await stream_through(worker, door, "engine")
        event = await worker.next_event(20)
    assert disturbed == undisturbed
    assert event["event"] == "restarted"
    assert event["pids"]["broker"] == before["broker"]
    assert event["pids"]["engine"] != before["engine"]


@pytest.mark.parametrize("door", ["zmq", "redis"])
async def test_kill_9_of_the_broker_is_a_pause_for_the_client(tmp_path: Path, door: str) -> None:
    """A fixed port, so that the ZeroMQ client finds the next broker where the last one was."""
    async with fake_worker(tmp_path, SLOW) as worker:
        before = worker.pids
        undisturbed = await stream_through(worker, door, "")
        disturbed = await stream_through(worker, door, "broker")
        event = await worker.next_event(20)
    assert disturbed == undisturbed
    assert event["pids"]["broker"] != before["broker"]
    assert event["pids"]["engine"] == before["engine"]
    assert event["zmq"] == worker.ready["zmq"]


async def test_sigterm_lets_running_jobs_finish_and_exits_with_code_0(tmp_path: Path) -> None:
    async with fake_worker(tmp_path, SLOW) as worker:
        pids = list(worker.pids.values())
        async with AsyncClient(zmq=worker.ready["zmq"]) as client:
            stream = client.generate("ab", max_tokens=NUM_TOKENS, ignore_eos=True)
            num_tokens = len((await anext(aiter(stream))).ids)
            worker.process.send_signal(signal.SIGTERM)
            async for tokens in stream:
                num_tokens += len(tokens.ids)
        code = await worker.stop()
    assert num_tokens == NUM_TOKENS
    assert code == ExitCode.OK
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("is_held_up", [False, True], ids=["", "broker without a turn"])
async def test_a_second_signal_gives_running_jobs_back_uncounted(
    tmp_path: Path, redis_server: RedisServer, is_held_up: bool
) -> None:
    """Another worker may take them at once: no lease has to run out, and no crash is counted. Also
    where the broker hears of both stops at once.
    """
    async with (
        run_worker(tmp_path / "data", (*SLOW, "--redis", redis_server.url)) as worker,
        AsyncClient(redis=redis_server.url) as client,
    ):
        job = await client.submit("ab", max_tokens=4_000, ignore_eos=True)
        stream = client.tail(job)
        await anext(stream)
        if is_held_up:
            os.kill(worker.pids["broker"], signal.SIGSTOP)
        for line in (b"worker.draining", b"worker.stopping_now"):
            worker.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while line not in worker.log_file.read_bytes():
                    await asyncio.sleep(0.01)
        if is_held_up:
            os.kill(worker.pids["broker"], signal.SIGCONT)
        assert await asyncio.wait_for(worker.process.wait(), 60) == ExitCode.OK
        with redis_server.client() as redis:
            facts = redis.hgetall(f"tokenbus:{{default}}:job:{job}")
        assert (facts["state"], facts["crashes"]) == ("queued", "0")


async def test_kill_9_of_the_supervisor_takes_its_processes_with_it(tmp_path: Path) -> None:
    async with fake_worker(tmp_path) as worker:
        pids = list(worker.pids.values())
        assert len(pids) == 4
        worker.process.kill()
        await ended(pids)


async def test_a_worker_outlives_the_readers_of_its_output(tmp_path: Path) -> None:
    """As in `tokenbus serve 2>&1 | head -1`: it goes on, restarts what dies, and drains."""
    where = ("--data-dir", str(tmp_path / "second"), "--redis", "none")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from ops.cli import main; main()"),
        *("serve", "--json", "--zmq", "tcp://127.0.0.1:0", *FAKE, *where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stderr.readline()
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    for pipe in (process.stdout, process.stderr):
        pipe._transport.close()  # type: ignore[attr-defined]
    os.kill(ready["pids"]["engine"], signal.SIGKILL)
    async with AsyncClient(zmq=ready["zmq"]) as client:
        assert len(await client.generate("ab", max_tokens=5).text()) > 0
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 30) == ExitCode.OK


async def test_a_taken_port_ends_the_worker_with_a_sentence(tmp_path: Path) -> None:
    async with fake_worker(tmp_path) as worker:
        arguments = (*FAKE, "--redis", "none", "--zmq", worker.ready["zmq"])
        with pytest.raises(WorkerFailed) as caught:
            async with run_worker(tmp_path / "second", arguments):
                pass
    assert caught.value.code is ExitCode.BUS_UNAVAILABLE
    assert "broker: address already in use" in caught.value.message.lower()
    assert "--zmq tcp://127.0.0.1:0" in caught.value.remedy


async def test_a_model_that_cannot_be_loaded_ends_the_worker_with_a_sentence(
    tmp_path: Path,
) -> None:
    """And at once: it is not tried three times."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(WorkerFailed) as caught:
        async with run_worker(tmp_path / "data", ("--model", str(broken), "--redis", "none")):
            pass
    assert caught.value.code is ExitCode.MODEL_UNAVAILABLE
    assert "broken.gguf" in caught.value.message
    assert "tokenbus doctor" in caught.value.remedy
    assert "process.restarting" not in (tmp_path / "data" / "worker.log").read_text()


async def test_log_level_and_format_reach_every_process(tmp_path: Path) -> None:
    arguments = (*FAKE, "--log-level", "debug", "--set", "log_format=console")
    async with fake_worker(tmp_path, arguments) as worker:
        text = worker.log_file.read_text()
        arguments_of = [Path(f"/proc/{worker.pids[name]}/cmdline") for name in ("broker", "engine")]
        for file in arguments_of:
            said = file.read_bytes().decode().split("\0")
            assert said[said.index("--log-level") + 1] == "debug"
    for event in ("process.started", "broker.listening", "engine.ready"):
        assert re.search(rf"^\d\d:\d\d:\d\d \[info +\] {event} ", text, re.MULTILINE), event


async def test_a_json_log_line_begins_with_when_how_bad_and_what(tmp_path: Path) -> None:
    async with fake_worker(tmp_path) as worker:
        pass
    lines = [json.loads(line) for line in worker.log_file.read_text().splitlines()]
    assert {tuple(line)[:3] for line in lines} == {("timestamp", "level", "event")}


async def test_client_commands_find_the_worker_on_this_host(tmp_path: Path) -> None:
    async with fake_worker(tmp_path) as worker:
        code, said = await tokenbus(worker, "submit", "Hello", "--raw", "-n", "5", "--json")
        assert code == ExitCode.OK, said
        job = json.loads(said)["job"]
        code, said = await tokenbus(worker, "tail", job, "--json")
        assert code == ExitCode.OK, said
        events = [json.loads(line) for line in said.splitlines()]
        assert [i for e in events for i in e.get("ids", ())]
        assert events[-1]["event"] == "done"
        code, said = await tokenbus(worker, "status", job, "--json")
        facts = json.loads(said)
        assert (code, facts["state"], facts["seq"]) == (ExitCode.OK, "done", 5)
        for command in ("status", "tail", "cancel"):
            code, said = await tokenbus(worker, command, "nobody-knows-it")
            assert code == ExitCode.NOT_FOUND, said
        code, said = await tokenbus(worker, "ask", "-", "--raw", "-n", "3", "--json", stdin="Hi")
        assert code == ExitCode.OK, said
        assert json.loads(said.splitlines()[-1])["usage"]["completion_tokens"] == 3
        code, said = await tokenbus(worker, "ask", "Hi", "--raw", "--temperature", "-1")
        assert code == ExitCode.JOB_FAILED
        assert "temperature" in said
        code, said = await tokenbus(worker, "cancel", job)
        assert (code, said) == (ExitCode.OK, f"{job} has ended already: done, length.\n")
        code, said = await tokenbus(worker, "dead", "list")
        assert (code, said) == (ExitCode.OK, "No dead jobs in queue default.\n")


async def test_a_dead_job_can_be_read_and_sent_again(tmp_path: Path) -> None:
    async with (
        fake_worker(tmp_path) as worker,
        Redis.from_url(worker.ready["redis"], decode_responses=True) as redis,
    ):
        letter = {"job": "j1", "reason": "it killed engines", "code": "poisoned", "attempts": "3"}
        request = {"request.prompt": "Hello", "request.max_tokens": "4", "request.job": "j1"}
        where = {"stream": "tokenbus:{default}:jobs", "worker": "w"}
        await redis.xadd("tokenbus:{default}:dead", {**letter, **where, **request})
        code, said = await tokenbus(worker, "dead", "show", "j1", "--json")
        assert code == ExitCode.OK, said
        assert json.loads(said)["request"] == {"prompt": "Hello", "max_tokens": "4", "job": "j1"}
        code, said = await tokenbus(worker, "dead", "requeue", "j1")
        assert code == ExitCode.OK, said
        code, said = await tokenbus(worker, "tail", said.strip(), "--json")
        assert (code, json.loads(said.splitlines()[-1])["event"]) == (ExitCode.OK, "done")
        assert await redis.xlen("tokenbus:{default}:dead") == 0
