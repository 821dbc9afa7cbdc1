"""The real model behind both doors, and the demonstration: what a newcomer sees first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ops.models import CATALOG, DEFAULT_MODEL, is_cached
from ops.worker_process import WorkerProcess, run_worker
from tokenbus import AsyncClient

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # loads the model, and two cores may be busy
    pytest.mark.skipif(
        not is_cached(CATALOG[DEFAULT_MODEL]) and "CI" not in os.environ,
        reason=f"tokenbus model fetch {DEFAULT_MODEL}",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    """One worker for all: its model takes longest. Who kills its engine waits until it is back."""
    async with run_worker(tmp_path_factory.mktemp("worker")) as worker:
        yield worker


async def restarted(worker: WorkerProcess, engine: int) -> None:
    """Until another engine than this one, which was killed, is there."""
    await worker.next_event()
    assert worker.pids["engine"] != engine


MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


async def answer(client: AsyncClient, seed: int | None) -> tuple[list[int], str]:
    """Ids and text of a short answer, greedy without a seed."""
    options = {"temperature": 0.8, "seed": seed} if seed is not None else {"temperature": 0.0}
    stream = client.generate(messages=MESSAGES, max_tokens=8, **options)  # type: ignore[arg-type]
    events = [tokens async for tokens in stream]
    return [i for event in events for i in event.ids], "".join(event.text for event in events)


async def test_a_job_has_the_same_tokens_through_either_door_greedy_and_seeded(
    worker: WorkerProcess,
) -> None:
    async with (
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        greedy = await asyncio.gather(answer(over_zmq, None), answer(over_redis, None))
        seeded = await asyncio.gather(
            answer(over_zmq, 7), answer(over_redis, 7), answer(over_zmq, 8)
        )
    assert greedy[0] == greedy[1]
    assert greedy[0][1].strip()
    assert seeded[0] == seeded[1]
    assert seeded[0] != seeded[2]


LOOPING = {"prompt": "One two one two one two one two", "max_tokens": 40, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 0.8}


async def looping_text(client: AsyncClient, engine_to_kill: int = 0, **options: float) -> str:
    """Greedy text of a prompt that invites repetition; halfway, the engine with this pid is
    killed."""
    text, num_tokens = "", 0
    async for event in client.generate(**LOOPING, temperature=0.0, **options):  # type: ignore[arg-type]
        text += event.text
        num_tokens += len(event.ids)
        if engine_to_kill and num_tokens >= 20:
            os.kill(engine_to_kill, signal.SIGKILL)
            engine_to_kill = 0
    return text


async def test_penalties_change_the_text_and_are_kept_when_the_engine_is_killed(
    worker: WorkerProcess,
) -> None:
    async with (
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        plain, over_one, over_other, *single = await asyncio.gather(
            looping_text(over_zmq),
            looping_text(over_zmq, **PENALTIES),
            looping_text(over_redis, **PENALTIES),
            *(looping_text(over_zmq, **{name: value}) for name, value in PENALTIES.items()),
        )
        assert over_one == over_other
        assert len({plain, *single}) == 4
        assert over_one != plain
        engine = worker.pids["engine"]
        continued = await asyncio.gather(
            looping_text(over_zmq, engine, **PENALTIES), looping_text(over_redis, **PENALTIES)
        )
        assert continued == [over_one, over_one]
        await restarted(worker, engine)


async def eight_stories(worker: WorkerProcess, kill_after_tokens: int | None) -> list[str]:
    """Texts of eight streams at once, half greedy, half seeded; the engine killed among them."""
    num_seen = 0

    async def story(client: AsyncClient, i: int) -> str:
        nonlocal num_seen
        text = ""
        options = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0.0}
        prompt = f"A story about {i} {'very ' * 12 * i}small animals:"
        async for event in client.generate(prompt=prompt, max_tokens=24, **options):  # type: ignore[arg-type]
            text += event.text
            before, num_seen = num_seen, num_seen + len(event.ids)
            if kill_after_tokens is not None and before < kill_after_tokens <= num_seen:
                os.kill(worker.pids["engine"], signal.SIGKILL)
        return text

    async with AsyncClient(zmq=worker.ready["zmq"]) as client:
        return list(await asyncio.gather(*(story(client, i) for i in range(8))))


async def test_eight_streams_give_the_same_text_when_the_engine_is_killed_among_them(
    worker: WorkerProcess,
) -> None:
    expected = await eight_stories(worker, kill_after_tokens=None)
    engine = worker.pids["engine"]
    assert await eight_stories(worker, kill_after_tokens=80) == expected
    await restarted(worker, engine)
    assert len(set(expected)) == 8


async def test_the_demonstration_runs_eight_jobs_over_both_doors_and_stops_its_worker() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.demo",
        "--json",
        "--max-tokens",
        "8",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + output.decode()
    said = json.loads(output)
    jobs = said["jobs"]
    assert [job["door"] for job in jobs] == ["redis", "zmq"] * 4
    assert {job["finish_reason"] for job in jobs} <= {"length", "stop"}
    assert all(1 <= job["tokens"] <= 8 and job["ttft_ms"] > 0 for job in jobs)
    assert all(job["text"].strip() for job in jobs)
    assert said["tokens"] == sum(job["tokens"] for job in jobs)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in said["worker"]["pids"].values())
