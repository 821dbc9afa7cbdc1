"""The link to Redis: replies lost at every step, partitions, and every form of URL."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.messages import Drain
from broker.streams.address import parse_redis_url
from broker.streams.lane import Lane, LinkLost, ReplyError
from broker.streams.scripts import SOURCES, script
from tests.redis_proxy import RedisProxy
from tests.redis_servers import RedisServer, ServerBinary
from tests.streams_kit import Bus, Worker, open_bus, text_of, until
from tokenbus import AsyncClient
from tokenbus.errors import BusUnavailable, InvalidField


@pytest.fixture
async def bus(shared_redis: RedisServer) -> AsyncIterator[Bus]:
    async with open_bus(shared_redis) as bus:
        yield bus


@pytest.fixture
async def proxy(shared_redis: RedisServer) -> AsyncIterator[RedisProxy]:
    proxy = await RedisProxy(shared_redis).start()
    yield proxy
    await proxy.close()


async def worker_behind(proxy: RedisProxy, bus: Bus, name: str = "a", **settings: int) -> Worker:
    worker = Worker(proxy.url, bus.queue, name, **settings)
    bus.workers.append(worker)
    return await worker.start()


def sha_of(name: str) -> bytes:
    command = script(name, (), ())
    return str(command[1]).encode()


CUTS = {
    "reading": lambda: sha_of("take"),
    "taking the attempt": lambda: sha_of("fence"),
    "publishing": lambda: b"tokens",
    "finishing": lambda: sha_of("finish"),
    "renewing": lambda: sha_of("renew"),
    "rejecting": lambda: sha_of("reject"),
    "claiming": lambda: sha_of("claim"),
}


@pytest.mark.parametrize("step", CUTS)
async def test_a_reply_lost_while(step: str, bus: Bus, proxy: RedisProxy) -> None:
    """The server has executed the commands, the worker does not know: nothing twice, no hole."""
    worker = await worker_behind(proxy, bus, lease_ms=2_000, renew_ms=200)
    worker.ledger.is_automatic = True
    before = bus.submit(max_tokens=30)
    await until(lambda: bus.text(before))
    proxy.cut_after = CUTS[step]()
    jobs = [before, *(bus.submit(max_tokens=20) for _ in range(3))]
    bad = bus.submit(temperature="nan")
    await until(lambda: proxy.num_cuts == 1)
    await until(lambda: all(bus.terminal(job) for job in (*jobs, bad)))
    for job in jobs:
        bus.audit(job)
        assert bus.events(job).count("started") == 1
    assert bus.events(bad) == ["error"]
    await until(lambda: bus.num_entries() == 0)
    bus.audit_queue()
    assert worker.door.counters.fenced == 0


async def test_connections_cut_at_random_lose_and_repeat_nothing(
    bus: Bus, proxy: RedisProxy
) -> None:
    worker = await worker_behind(proxy, bus, lease_ms=3_000)
    worker.ledger.is_automatic = True
    jobs = [bus.submit(max_tokens=60) for _ in range(8)]
    for i in range(12):
        await asyncio.sleep(0.03 * (i % 4 + 1))
        proxy.cut()
    await until(lambda: all(bus.terminal(job) for job in jobs))
    for job in jobs:
        bus.audit(job)
    await until(lambda: bus.num_entries() == 0)
    bus.audit_queue()


async def test_a_partitioned_worker_stops_by_itself_and_is_fenced_when_it_is_back(
    bus: Bus, proxy: RedisProxy
) -> None:
    a = await worker_behind(proxy, bus, lease_ms=700, renew_ms=200)
    job = bus.submit(max_tokens=10)
    await until(lambda: job in a.ledger.runs)
    a.ledger.step(job, 3)
    await until(lambda: bus.text(job) == text_of(3))
    proxy.drop_requests = proxy.drop_replies = True
    a.ledger.step(job, 1)
    b = await bus.worker("b", lease_ms=700, renew_ms=200)
    await until(lambda: job in b.ledger.runs)
    await until(lambda: a.ledger.runs[job].is_paused)  # by its own clock, no word from Redis
    assert not a.monitor.is_ready
    b.ledger.step(job, 2)
    proxy.heal()
    await until(lambda: job not in a.ledger.runs)
    assert a.door.counters.fenced == 1
    b.ledger.step(job, 5)
    b.ledger.finish(job)
    await until(lambda: bus.terminal(job))
    bus.audit(job)
    bus.audit_queue()


async def test_a_server_that_accepts_and_says_nothing_is_noticed(
    bus: Bus, proxy: RedisProxy
) -> None:
    worker = await worker_behind(proxy, bus, socket_timeout_ms=500)
    proxy.drop_replies = True
    broken_at = time.monotonic()
    await until(lambda: not worker.monitor.is_ready, timeout_s=5)
    await asyncio.sleep(1.0)
    assert not worker.monitor.is_ready
    proxy.heal()
    job = bus.submit()
    await until(lambda: job in worker.ledger.runs, timeout_s=2)
    assert time.monotonic() - broken_at < 8


async def test_a_worker_starts_before_its_redis(redis_binary: ServerBinary) -> None:
    server = RedisServer(redis_binary).start()
    server.kill()
    worker = Worker(server.url, "q", "a")
    worker.begin()
    await until(lambda: worker.monitor.reports)
    assert not worker.monitor.is_ready
    server.start()
    await until(lambda: worker.monitor.is_ready, timeout_s=2)
    await worker.stop()
    server.close()


async def test_scripts_are_loaded_again_when_the_server_forgot_them(bus: Bus) -> None:
    worker = await bus.worker()
    worker.ledger.is_automatic = True
    for _ in range(3):
        bus.client.script_flush()
        job = bus.submit(max_tokens=5)
        await until(lambda job=job: bus.terminal(job))
        bus.audit(job)


async def test_a_drain_asked_for_on_the_control_stream_is_passed_on(bus: Bus) -> None:
    a, b = await bus.worker("a"), await bus.worker("b")
    bus.client.xadd(bus.keys.control, {"op": "drain", "worker": "b"})
    await until(lambda: any(isinstance(report, Drain) for report in b.monitor.reports))
    assert not any(isinstance(report, Drain) for report in a.monitor.reports)


# ---------------------------------------------------------------- URLs


async def test_password_and_acl_user(redis_binary: ServerBinary) -> None:
    server = RedisServer(redis_binary).start()
    try:
        server.client().execute_command(
            *("ACL", "SETUSER", "w", "on", ">p@ss/w", "~tokenbus:*", "+@all", "-@dangerous"),
            *("+info", "+client"),
        )
        server.client().execute_command("ACL", "SETUSER", "default", "off")
        good = server.url.replace("unix://", "unix://w:p%40ss%2Fw@")
        worker = await Worker(good, "q", "a").start()
        await worker.stop()
        worker = Worker(server.url, "q", "b")
        worker.begin()
        await until(lambda: worker.monitor.reports)
        assert "NOAUTH" in worker.monitor.reports[0].reason
        await worker.kill()
    finally:
        server.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_a_rediss_url_checks_the_certificate(
    shared_redis: RedisServer, certificate: tuple[Path, Path]
) -> None:
    """For the worker and for its client."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    proxy = await RedisProxy(shared_redis, tls).start()
    trusting = f"{proxy.url}?ssl_ca_certs={certificate[0]}"
    worker = await Worker(trusting, "tls", "w").start()
    worker.ledger.is_automatic = True
    async with AsyncClient(redis=trusting, queue="tls") as client:
        assert await client.generate("x", max_tokens=3).text() == text_of(3)
    await worker.stop()
    with pytest.raises(LinkLost):
        await Lane.connect(parse_redis_url(proxy.url).seeds[0], 2.0)
    async with AsyncClient(redis=proxy.url, queue="tls") as client:
        with pytest.raises(BusUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await client.submit("x")
    await proxy.close()


BAD_URLS = (
    "",
    "http://x",
    "redis://h:port",
    "redis://h/0/1",
    "redis://h?what=1",
    "redis+cluster://h/3",
)


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_redis_url(url)
    assert caught.value.field == "redis"


def test_no_secret_is_printed() -> None:
    address = parse_redis_url("redis+sentinel://user:secret@a,b:7/service/3")
    assert "secret" not in f"{address!r} {address}"
    assert [str(seed) for seed in address.seeds] == ["a:26379", "b:7"]
    node = address.node_at("c", 1)
    assert node.hello() == [("AUTH", "user", "secret"), ("SELECT", 3)]


async def test_a_wrong_password_is_an_error_reply(redis_binary: ServerBinary) -> None:
    server = RedisServer(redis_binary).start()
    try:
        server.client().config_set("requirepass", "right")
        url = server.url.replace("unix://", "unix://:wrong@")
        with pytest.raises(ReplyError, match="WRONGPASS"):
            await Lane.connect(parse_redis_url(url).seeds[0], 2.0)
    finally:
        server.close()


def test_every_script_says_what_it_takes() -> None:
    for name, source in SOURCES.items():
        head = source.decode().rpartition("-- KEYS")[2]
        assert "ARGV" in head[:2_000], name
