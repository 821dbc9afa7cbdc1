"""The clients in Python, Node.js and C, side by side on one worker: the same jobs have the same
bytes, also when the engine is killed in mid-stream, with CURVE keys, and as durable jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker.config import ZmqConfig
from broker.ring.records import Sampling
from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from ops.models import CATALOG, DEFAULT_MODEL, is_cached
from ops.worker_process import run_worker
from tests.integration.client_runs import (
    Answer,
    Job,
    ProgramRun,
    PythonRun,
    build_node,
    make_c,
    run_python,
    start_program,
    twenty_jobs,
    what_c_misses,
    what_node_misses,
)
from tests.integration.test_zmq_durable import QUICK, Site
from tests.integration.worker import make_worker, running
from tests.integration.zmq_raw import letters_of
from tests.redis_servers import RedisServer, find_servers
from tokenbus.client import AsyncClient
from tokenbus.dealer import CurveKeys
from tokenbus.door import Timeouts
from tokenbus.errors import BusUnavailable

VOCAB = 512
pytestmark = pytest.mark.timeout(300)  # compiles, and two cores may be busy


@dataclass(frozen=True)
class Programs:
    """`commands`: by language, to be followed by an endpoint. `missing`: why the others are not
    there.
    """

    commands: dict[str, list[str]]
    missing: dict[str, str]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """What can be built here, compiled."""
    commands, missing = {}, {"c": what_c_misses(), "node": what_node_misses()}
    if not missing["c"]:
        build = tmp_path_factory.mktemp("c")
        make_c(build, f"{build}/stress", "CFLAGS=-O1 -g")
        commands["c"] = [str(build / "stress")]
    if not missing["node"]:
        build = tmp_path_factory.mktemp("node")
        missing["node"] = build_node(build)
        if not missing["node"]:
            commands["node"] = ["node", str(build / "test" / "stress.mjs")]
    return Programs(commands, missing)


Runs = dict[str, ProgramRun | PythonRun]


@contextlib.asynccontextmanager
async def all_clients(programs: Programs, endpoint: str, jobs: list[Job]) -> AsyncIterator[Runs]:
    """The jobs with every client at the same time."""
    async with contextlib.AsyncExitStack() as stack:
        runs: Runs = {}
        for language, command in programs.commands.items():
            runs[language] = await start_program([*command, endpoint], jobs)
            stack.push_async_callback(runs[language].stop)
        runs["python"] = PythonRun(endpoint, jobs)
        stack.push_async_callback(runs["python"].stop)
        yield runs


async def run_all(programs: Programs, endpoint: str, jobs: list[Job]) -> dict[str, list[Answer]]:
    async with all_clients(programs, endpoint, jobs) as runs:
        return {language: await run.answers() for language, run in runs.items()}


@pytest.mark.parametrize("language", ["node", "c"])
def test_the_client_is_built(programs: Programs, language: str) -> None:
    """Says which of them the tests below are without, and why."""
    if programs.missing[language]:
        pytest.skip(programs.missing[language])
    assert language in programs.commands


async def test_twenty_jobs_have_the_same_bytes_also_across_kills_of_the_engine(
    programs: Programs, tmp_path: Path
) -> None:
    jobs = twenty_jobs(max_tokens=200)
    fake = FakeModel(vocab_size=VOCAB, step_ms=8.0)
    async with running(make_worker(tmp_path, fake=fake, max_num_seqs=64)) as worker:
        undisturbed = await run_all(programs, worker.endpoint, jobs)
        expected = undisturbed["python"]
        check_fake_answers(jobs, expected)
        assert undisturbed == dict.fromkeys(undisturbed, expected)
        async with all_clients(programs, worker.endpoint, jobs) as runs:
            for count, reached in ((2, 20), (3, 60)):
                for run in runs.values():
                    await run.reach(reached)
                await worker.kill_engine()
                await check_in_mid_stream(runs)
                await worker.start_engine()
                await worker.wait_for("ready", count)
            killed = {language: await run.answers() for language, run in runs.items()}
    assert killed == dict.fromkeys(undisturbed, expected)


async def check_in_mid_stream(runs: Runs) -> None:
    """The engine is dead, and there is something left to do."""
    for run in runs.values():
        if isinstance(run, PythonRun):
            assert "running" in await run.states()
        else:
            assert not run.is_over


def check_fake_answers(jobs: list[Job], answers: list[Answer]) -> None:
    """The answers (but for chats, whose prompt the worker makes) are what the fake model must give,
    and no two are alike.
    """
    assert len({answer.ids for answer in answers}) == len(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        assert (answer.end, len(answer.ids)) == ("length", job.max_tokens)
        assert answer.text.decode() == letters_of(list(answer.ids))
        if job.kind == "0":
            prompt = [byte % VOCAB for byte in job.prompt.encode()]
            sampling = Sampling(temperature=job.temperature, seed=job.seed)
            assert list(answer.ids) == expected_tokens(prompt, job.max_tokens, VOCAB, sampling)


# ------------------------------------------------------------ keys


@dataclass(frozen=True)
class KeyRing:
    """CURVE keys of one worker and its clients; `friend` is in the worker's allow list."""

    zmq: ZmqConfig
    clients: dict[str, CurveKeys]


@pytest.fixture
def key_ring(tmp_path: Path) -> KeyRing:
    pairs = {name: zmq.curve_keypair() for name in ("server", "friend", "stranger")}
    server_key = pairs["server"][0].decode()
    secret, allow = tmp_path / "server.secret", tmp_path / "allow"
    secret.write_text(pairs["server"][1].decode())
    secret.chmod(0o600)
    allow.write_text(f"{pairs['friend'][0].decode()} team-a\n")
    clients = {
        name: CurveKeys(server_key, public.decode(), private.decode())
        for name, (public, private) in pairs.items()
    }
    clients["friend of another"] = CurveKeys(
        clients["stranger"].public_key, clients["friend"].public_key, clients["friend"].secret_key
    )
    del clients["server"]
    return KeyRing(ZmqConfig("", secret_key_file=str(secret), allow_file=str(allow)), clients)


async def start_one(
    programs: Programs,
    language: str,
    endpoint: str,
    jobs: list[Job],
    *,
    curve: CurveKeys | None = None,
    connect_s: float = 10.0,
    **options: Any,
) -> ProgramRun | PythonRun:
    """The jobs with the Python or the Node client; `options` are more fields of each job."""
    if language == "python":
        timeouts = Timeouts(connect_s=connect_s)
        return PythonRun(endpoint, jobs, options, curve=curve, timeouts=timeouts)
    if programs.missing["node"]:
        pytest.skip(programs.missing["node"])
    client: dict[str, Any] = {"timeouts": {"connectMs": connect_s * 1_000}}
    if curve is not None:
        client["curve"] = {
            "serverKey": curve.server_key,
            "publicKey": curve.public_key,
            "secretKey": curve.secret_key,
        }
    command = [*programs.commands["node"], endpoint, json.dumps(client), json.dumps(options)]
    return await start_program(command, jobs)


@pytest.mark.parametrize("language", ["python", "node"])
async def test_with_keys_a_friend_is_served_also_by_a_restarted_broker_and_others_are_not(
    programs: Programs, key_ring: KeyRing, tmp_path: Path, language: str
) -> None:
    jobs = [Job("hello", 200), Job("hello", 200, 0.9, seed=3)]
    fake = FakeModel(vocab_size=VOCAB, step_ms=8.0)
    async with (
        running(make_worker(tmp_path, fake=fake, zmq=key_ring.zmq)) as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        friend = key_ring.clients["friend"]
        run = await start_one(programs, language, worker.endpoint, jobs, curve=friend)
        stack.push_async_callback(run.stop)
        await run.reach(20)
        await worker.kill_broker()
        assert not run.is_over
        await worker.start_broker()
        answers = await run.answers()
        assert answers[0].ids != answers[1].ids
        check_fake_answers(jobs, answers)
        for curve in (key_ring.clients["stranger"], key_ring.clients["friend of another"], None):
            other = await start_one(
                programs, language, worker.endpoint, jobs, curve=curve, connect_s=0.7
            )
            stack.push_async_callback(other.stop)
            await check_unavailable(other)


async def check_unavailable(run: ProgramRun | PythonRun) -> None:
    """The jobs found no worker."""
    if isinstance(run, PythonRun):
        with pytest.raises(BusUnavailable):
            await run.answers()
    else:
        assert {answer.end for answer in await run.answers()} == {"unavailable"}


# ------------------------------------------------------------ durable jobs


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """Workers on one Redis."""
    redis = RedisServer(find_servers()[-1]).start()
    site = Site(tmp_path, redis)
    try:
        yield site
    finally:
        for worker in site.workers:
            with contextlib.suppress(ProcessLookupError):
                await worker.stop()
        redis.close()


@pytest.mark.parametrize("language", ["python", "node"])
async def test_durable_jobs_run_elsewhere_and_survive_the_kill_of_their_door(
    programs: Programs, site: Site, language: str
) -> None:
    jobs = [Job(f"job {i}", 200, 0.9 * (i % 2), seed=i) for i in range(4)]
    front = await site.worker("front", has_engine=False, zmq=QUICK)
    await site.worker("back", step_ms=8.0)
    await site.until_connected(front)
    run = await start_one(programs, language, front.endpoint, jobs, durable=True)
    try:
        await run.reach(20)
        await front.kill_broker()
        assert not run.is_over
        await front.start_broker()
        check_fake_answers(jobs, await run.answers())
    finally:
        await run.stop()


async def test_a_durable_job_is_left_and_read_cancelled_and_asked_for_at_another_worker(
    site: Site,
) -> None:
    first = await site.worker("first", step_ms=8.0)
    second = await site.worker("second", has_engine=False)
    await site.until_connected(second)
    async with AsyncClient(zmq=first.endpoint) as client:
        job = await client.submit("hello", max_tokens=60, durable=True)
        endless = await client.submit("hello", max_tokens=3_000, durable=True)
    async with AsyncClient(zmq=second.endpoint) as client:
        expected = expected_tokens(list(b"hello"), 60, VOCAB)
        assert await client.tail(job).text() == letters_of(expected)
        ids = [i async for event in client.tail(job, from_seq=60) for i in event.ids]
        assert ids == []
        assert (await client.status(job)).state == "done"
        assert (await client.status(endless)).state == "running"
        await client.cancel(endless)
        status = await client.status(endless)
        assert (status.state, status.reason) == ("done", "cancelled")


# ------------------------------------------------------------ the real model


@pytest.mark.slow
@pytest.mark.skipif(
    not is_cached(CATALOG[DEFAULT_MODEL]) and "CI" not in os.environ,
    reason=f"tokenbus model fetch {DEFAULT_MODEL}",
)
async def test_the_real_model_gives_every_client_the_same_text_also_across_a_kill(
    programs: Programs, tmp_path: Path
) -> None:
    jobs = twenty_jobs(max_tokens=10)[2::5]  # two greedy, two seeded; two with Chinese and emoji
    async with run_worker(tmp_path) as worker:
        endpoint = worker.ready["zmq"]
        expected = await run_python(endpoint, jobs)
        assert all(answer.text.strip() for answer in expected)
        async with all_clients(programs, endpoint, jobs) as runs:
            await runs["python"].reach(4)
            os.kill(worker.pids["engine"], signal.SIGKILL)
            assert not any(run.is_over for run in runs.values())
            answers = {language: await run.answers() for language, run in runs.items()}
    assert answers == dict.fromkeys(answers, expected)
