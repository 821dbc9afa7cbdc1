"""The ZeroMQ door when processes die, jobs kill, workers drain, and strangers knock."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker.__main__ import EXIT_BAD_SETTING, EXIT_NO_ADDRESS, EXIT_NO_MODEL
from broker.config import ZmqConfig
from broker.gateway.security import (
    Curve,
    InsecureBind,
    ZapHandler,
    is_local,
    load_curve,
    read_allow_list,
)
from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from tests.integration.worker import ROOT, Worker, environment, make_worker, running
from tests.integration.zmq_raw import RawClient, letters_of, take
from tests.integration.zmq_raw import Reply as Reply
from tokenbus.client import AsyncClient
from tokenbus.dealer import CurveKeys
from tokenbus.protocol import MessageType as T

VOCAB = 512
EVIL = 5  # a prompt with this id kills the engine


def expect(text: str, count: int) -> list[int]:
    return expected_tokens([b % VOCAB for b in text.encode()], count, VOCAB)


async def restart_engines(worker: Worker, crashes: list[int]) -> None:
    """The supervisor's part: a new engine whenever one dies."""
    while True:
        assert worker.engine is not None
        crashes.append(await worker.engine.wait())
        await worker.start_engine()


# ------------------------------------------------------------ death of the engine


async def test_kill_of_the_engine_in_mid_stream_is_a_pause_for_the_clients(tmp_path: Path) -> None:
    fake = FakeModel(vocab_size=VOCAB, step_ms=3.0)
    async with (
        running(make_worker(tmp_path, fake=fake)) as worker,
        RawClient(worker.endpoint) as client,
    ):
        await client.hello()
        jobs = [await client.submit(prompt=f"job {i}", max_tokens=80) for i in range(6)]
        replies = {job: Reply() for job in jobs}
        for count in (2, 3):  # two kills
            seen = {job: len(reply.ids) for job, reply in replies.items()}
            while any(len(r.ids) < seen[job] + 8 for job, r in replies.items()):
                take(replies, await client.next())
            await worker.kill_engine()
            await worker.start_engine()
            await worker.wait_for("ready", count)
        while any(reply.end is None for reply in replies.values()):
            take(replies, await client.next())
        for i, job in enumerate(jobs):
            ids = expect(f"job {i}", 80)
            assert replies[job].ids == ids
            assert replies[job].text == letters_of(ids)
            assert replies[job].body["reason"] == "length"


async def test_jobs_submitted_while_no_engine_is_there_run_when_one_comes(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    await worker.start_broker()
    try:
        async with RawClient(worker.endpoint) as client:
            await client.hello()
            job = await client.submit(prompt="early", max_tokens=5)
            await client.receive(T.ACCEPTED)
            await worker.start_engine()
            assert (await client.collect(job))[job].ids == expect("early", 5)
    finally:
        await worker.stop()


async def test_the_job_that_kills_the_engine_is_poisoned_and_its_neighbours_complete(
    tmp_path: Path,
) -> None:
    fake = FakeModel(vocab_size=VOCAB, step_ms=2.0, crash_token=EVIL)
    crashes: list[int] = []
    async with (
        running(make_worker(tmp_path, fake=fake)) as worker,
        RawClient(worker.endpoint) as client,
    ):
        keeper = asyncio.create_task(restart_engines(worker, crashes))
        try:
            await client.hello()
            good = [await client.submit(prompt=f"good {i}", max_tokens=40) for i in range(5)]
            evil = await client.submit(input_ids=[1, EVIL, 2], max_tokens=4)
            late = await client.submit(prompt="late", max_tokens=10)
            replies = await client.collect(*good, evil, late)
        finally:
            keeper.cancel()
        assert crashes == [-signal.SIGKILL] * 3
        assert (replies[evil].body["code"], replies[evil].body["retry"]) == ("poisoned", False)
        for i, job in enumerate(good):
            assert replies[job].ids == expect(f"good {i}", 40)
        assert replies[late].ids == expect("late", 10)


async def test_an_engine_that_hangs_is_killed_and_the_job_that_hangs_it_is_poisoned(
    tmp_path: Path,
) -> None:
    fake = FakeModel(vocab_size=VOCAB, step_ms=2.0, hang_token=EVIL)
    crashes: list[int] = []
    async with (
        running(make_worker(tmp_path, fake=fake, engine_hang_ms=1_300)) as worker,
        RawClient(worker.endpoint) as client,
    ):
        keeper = asyncio.create_task(restart_engines(worker, crashes))
        try:
            await client.hello()
            good = await client.submit(prompt="good", max_tokens=40)
            evil = await client.submit(input_ids=[1, EVIL, 2], max_tokens=4)
            replies = await client.collect(good, evil)
        finally:
            keeper.cancel()
        assert crashes == [-signal.SIGKILL] * 3
        assert replies[evil].body["code"] == "poisoned"
        assert replies[good].ids == expect("good", 40)


# ------------------------------------------------------------ drain


async def test_drain_finishes_what_runs_gives_back_what_waits_and_exits_0(tmp_path: Path) -> None:
    fake = FakeModel(vocab_size=VOCAB, step_ms=10.0)
    worker = make_worker(tmp_path, fake=fake, max_num_seqs=2)
    async with running(worker), RawClient(worker.endpoint) as client:
        await client.hello()
        jobs = [await client.submit(prompt=f"d{i}", max_tokens=30) for i in range(8)]
        await client.receive(T.TOKENS)
        assert worker.broker is not None
        worker.broker.send_signal(signal.SIGTERM)
        replies = {job: Reply(ids=[0]) for job in jobs}
        for reply in replies.values():
            reply.ids = []
        drain = await client.receive(T.DRAIN, T.ERROR)
        assert drain.type is T.DRAIN
        new = await client.submit(prompt="too late")
        ends: dict[str, Any] = {}
        while len(ends) < 9:
            message = await client.receive(T.DONE, T.ERROR, T.REJECTED)
            ends[message.body["job"]] = message.body
        assert ends[new]["code"] == "draining"
        reasons = [ends[job].get("reason") or ends[job]["code"] for job in jobs]
        assert sorted(set(reasons)) == ["draining", "length"]
        assert all(
            ends[job]["retry"] for job, r in zip(jobs, reasons, strict=True) if r != "length"
        )
        assert await worker.stop() == 0
    assert worker.engine is not None
    assert worker.engine.returncode == 0
    events = [line["event"] for line in worker.status]
    assert (events[-1], events.count("draining")) == ("drained", 1)


# ------------------------------------------------------------ keys


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Pairs (public, secret) of the server and two clients; `friend` is in the allow list."""
    pairs = {}
    for name in ("server", "friend", "stranger"):
        public, secret = zmq.curve_keypair()
        pairs[name] = (public.decode(), secret.decode())
    (tmp_path / "server.secret").write_text(pairs["server"][1] + "\n")
    (tmp_path / "server.secret").chmod(0o600)
    (tmp_path / "allow").write_text(f"# clients\n{pairs['friend'][0]} team-a  # ours\n")
    return pairs


def keyed(tmp_path: Path) -> ZmqConfig:
    return ZmqConfig(
        "", secret_key_file=str(tmp_path / "server.secret"), allow_file=str(tmp_path / "allow")
    )


async def test_with_keys_a_friend_is_served_as_its_tenant_and_a_stranger_is_not(
    tmp_path: Path, keys: dict[str, tuple[str, str]]
) -> None:
    async with running(make_worker(tmp_path, zmq=keyed(tmp_path))) as worker:

        def curve(name: str) -> CurveKeys:
            return CurveKeys(keys["server"][0], *keys[name])

        async with AsyncClient(zmq=worker.endpoint, curve=curve("friend")) as client:
            text = "".join([t.text async for t in client.generate("hello", max_tokens=8)])
            assert text == letters_of(expect("hello", 8))
        for secured in (True, False):
            async with RawClient(worker.endpoint) as stranger:
                if secured:
                    stranger.socket.curve_serverkey = keys["server"][0].encode()
                    stranger.socket.curve_publickey = keys["stranger"][0].encode()
                    stranger.socket.curve_secretkey = keys["stranger"][1].encode()
                    stranger.socket.disconnect(worker.endpoint)
                    stranger.socket.connect(worker.endpoint)
                await stranger.send(T.HELLO, client=stranger.name, credit=1)
                with pytest.raises(TimeoutError):
                    await stranger.next(timeout_s=0.5)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://localhost:*", True),
        ("ipc:///run/x.sock", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://[::]:5555", False),
    ],
)
def test_only_loopback_may_be_bound_in_clear(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local
    if not local:
        with pytest.raises(InsecureBind, match="secret_key_file"):
            load_curve(ZmqConfig(endpoint))
    assert load_curve(ZmqConfig(endpoint, allow_insecure_bind=True)) is None


def test_key_files_are_checked(tmp_path: Path, keys: dict[str, tuple[str, str]]) -> None:
    config = keyed(tmp_path)
    curve = load_curve(config)
    assert curve is not None
    assert curve.public_key.decode() == keys["server"][0]
    assert curve.tenants == {keys["friend"][0].encode(): "team-a"}
    assert keys["server"][1] not in repr(curve)
    with pytest.raises(InsecureBind, match="allow_file"):
        load_curve(replace(config, allow_file=""))
    (tmp_path / "server.secret").chmod(0o644)
    with pytest.raises(InsecureBind, match="mode 0644"):
        load_curve(config)
    (tmp_path / "server.secret").chmod(0o600)
    (tmp_path / "server.secret").write_text("not a key")
    with pytest.raises(InsecureBind, match="Z85"):
        load_curve(config)
    (tmp_path / "allow").write_text("nonsense\n")
    with pytest.raises(InsecureBind, match="allow:1"):
        read_allow_list(tmp_path / "allow")


def test_a_key_may_hold_the_sign_that_begins_comments(tmp_path: Path) -> None:
    key, other = (zmq.utils.z85.encode(n.to_bytes(4) * 8).decode() for n in (51_586_500, 84))
    assert "#" in key
    assert "#" in other
    lines = [f"{key} team # ours", "# a comment", "#", "", f"  {other}  # no tenant"]
    (tmp_path / "allow").write_text("\n".join(lines))
    allowed = read_allow_list(tmp_path / "allow")
    assert allowed == {key.encode(): "team", other.encode(): ""}
    (tmp_path / "allow").write_text("#" * 40 + "\n" + "$" * 40)
    with pytest.raises(InsecureBind, match="allow:2"):
        read_allow_list(tmp_path / "allow")


def test_zap_denies_other_mechanisms_and_unknown_keys(keys: dict[str, tuple[str, str]]) -> None:
    public = keys["friend"][0].encode()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handler = ZapHandler(context, Curve(b"", b"", {public: ""}))
    asker = context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    cases: Sequence[tuple[bytes, list[bytes], bytes]] = (
        (b"CURVE", [zmq.utils.z85.decode(public)], b"200"),
        (b"CURVE", [bytes(32)], b"400"),
        (b"NULL", [], b"400"),
        (b"PLAIN", [b"user", b"password"], b"400"),
    )
    try:
        for mechanism, credentials, status in cases:
            asker.send_multipart([b"1.0", b"1", b"", b"1.2.3.4", b"", mechanism, *credentials])
            handler.answer_all()
            assert asker.recv_multipart()[2] == status
    finally:
        asker.close(0)
        handler.close()
        context.term()


# ------------------------------------------------------------ start


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("public address", EXIT_BAD_SETTING),
        ("port taken", EXIT_NO_ADDRESS),
        ("no model", EXIT_NO_MODEL),
        ("not JSON", EXIT_BAD_SETTING),
        ("unknown key", EXIT_BAD_SETTING),
    ],
)
async def test_a_configuration_that_cannot_work_has_its_exit_code(
    tmp_path: Path, fault: str, code: int
) -> None:
    worker = make_worker(tmp_path)
    config = worker.config
    assert config.zmq is not None
    taken: zmq.Socket[bytes] | None = None
    if fault == "public address":
        config = replace(config, zmq=replace(config.zmq, endpoint="tcp://0.0.0.0:0"))
    elif fault == "port taken":
        taken = zmq.Context.instance().socket(zmq.ROUTER)
        taken.linger = 0
        taken.bind("tcp://127.0.0.1:*")
        endpoint = taken.get_string(zmq.LAST_ENDPOINT)
        config = replace(config, zmq=replace(config.zmq, endpoint=endpoint))
    elif fault == "no model":
        config = replace(config, fake_vocab_size=0, model_path=str(tmp_path / "nothing.gguf"))
    path = tmp_path / "broker.json"
    text = config.to_json()
    if fault == "unknown key":
        text = text.replace("worker", "werker", 1)
    path.write_text("{" if fault == "not JSON" else text)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "broker", "--config", str(path),
        cwd=ROOT, env=environment(), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    if taken is not None:
        taken.close()
    assert process.returncode == code, stderr.decode()
    assert b"broker.cannot_start" in stderr
    assert b"Traceback" not in stderr
