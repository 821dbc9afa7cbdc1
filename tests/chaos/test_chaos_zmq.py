"""The way between a ZeroMQ client and its worker: slow, half open, cut between two frames, gone."""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from ops.bench.chaos_framing import ZmtpFramer
from ops.bench.chaos_load import PATIENT
from ops.bench.chaos_proxy import TcpProxy
from tests.chaos.kit.processes import Child
from tests.chaos.kit.site import (
    FAST,
    Ask,
    ChaosSite,
    Listener,
    letters,
    no_blocks_used,
    open_site,
    wait_for,
)
from tests.integration.zmq_raw import RawClient
from tokenbus import AsyncClient
from tokenbus.protocol import MessageType

STEP = ("--set", "fake.step_ms=5")
QUICK = ("--set", "gateway.heartbeat_ms=300", "--set", "gateway.gone_ms=1000")

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[ChaosSite]:
    """One worker that steps each 5 ms, for all tests that break only connections."""
    async with open_site(1, (*STEP, "--set", "gateway.heartbeat_ms=500")) as site:
        yield site


def frame_proxy(site: ChaosSite) -> TcpProxy:
    """Between a client and the worker, frame by frame."""
    path = site.workers[0].endpoint.removeprefix("ipc://")
    return TcpProxy(path, ZmtpFramer)


def far(proxy: TcpProxy) -> AsyncClient:
    """A client behind a proxy."""
    return AsyncClient(zmq=f"tcp://127.0.0.1:{proxy.port}", timeouts=PATIENT)


@pytest.mark.parametrize("end", ["reads_again", "dies"])
async def test_a_client_that_stops_reading_holds_up_nobody_and(site: ChaosSite, end: str) -> None:
    """Its socket fills; the others' jobs run beside it and after it."""
    slow, others = Listener(), Listener()
    with frame_proxy(site) as proxy:
        async with far(proxy) as client:
            for i in range(20):
                slow.generate(client, Ask(f"slow {i}", 800))
            await slow.running()
            proxy.stall(proxy.down)
            near = site.zmq()
            for i in range(20):
                others.generate(near, Ask(f"other {i}", 100))
            await others.audit(timeout_s=30)
            if end == "reads_again":
                proxy.heal()
                await slow.audit()
            else:
                proxy.cut()
                proxy.refuse()
                late = Listener()
                late.generate(near, Ask("late", 50))
                await late.audit(timeout_s=10)
                proxy.heal()
                await slow.audit()
    await site.audit()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_half_open_connection_is_left_within_three_heartbeats(
    site: ChaosSite, direction: str
) -> None:
    listener = Listener()
    with frame_proxy(site) as proxy:
        async with far(proxy) as client:
            for i in range(5):
                listener.generate(client, Ask(f"half {i}", 800))
            await listener.running()
            accepted = proxy.accepted
            proxy.swallow(getattr(proxy, direction))
            await wait_for(
                lambda: proxy.accepted > accepted, 6.0, "the client tried another connection"
            )
            proxy.heal()
            await listener.audit()
    await site.audit()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [MessageType.ACCEPTED, MessageType.TOKENS, MessageType.DONE])
async def test_a_connection_cut_at_a_message_is_resumed_there(
    site: ChaosSite, kind: MessageType, after: bool
) -> None:
    header = bytes((ord("T"), ord("B"), 1, kind))
    listener = Listener()
    with frame_proxy(site) as proxy:
        proxy.cut_at(proxy.down, lambda frame: frame.endswith(header), after=after)
        async with far(proxy) as client:
            for i in range(3):
                listener.generate(client, Ask(f"cut {i}", 60))
            await listener.audit()
        assert proxy.cuts == 1
    await site.audit()


async def test_large_messages_back_to_back_arrive_as_they_were_sent() -> None:
    """A buffer that is used again while it is sent shows itself in the checksum. 64 KiB is from
    where on sockets may send without a copy.
    """
    ask = Ask("long", 22_000)
    settings = ("fake.max_model_len=23000", "gateway.log_tokens_per_job=60000")
    flags = [part for setting in settings for part in ("--set", setting)]
    async with open_site(1, flags) as site, RawClient(site.workers[0].endpoint) as client:
        await client.hello(credit=1)  # the rest comes in one message
        job = await client.submit(prompt=ask.prompt, max_tokens=ask.max_tokens)
        await client.receive(MessageType.ACCEPTED)
        state = ""
        while state != "done":
            await client.send(MessageType.STATS, job=job)
            state = (await client.receive(MessageType.STATS)).body["state"]
            await asyncio.sleep(0.05)
        await client.send(MessageType.CREDIT, total=1 << 30)
        await client.send(MessageType.RESUME, job=job, after=0)
        await client.receive(MessageType.DONE)
        ids = ask.ids
        crc, text = zlib.crc32(np.array(ids, "<i4").tobytes()), letters(ids)
        for _ in range(10):
            for _ in range(3):  # one before the other is read
                await client.send(MessageType.RESUME, job=job, after=0)
            for _ in range(3):
                reply = (await client.collect(job))[job]
                assert reply.body["crc"] == crc
                assert zlib.crc32(np.array(reply.ids, "<i4").tobytes()) == crc
                assert reply.text == text
        assert client.largest_bytes > 64 << 10


async def test_a_wait_that_is_given_up_again_and_again_loses_no_token(site: ChaosSite) -> None:
    ask = Ask("impatient", 400)
    ids: list[int] = []
    num_given_up = 0
    async with AsyncClient(zmq=site.workers[0].endpoint, timeouts=PATIENT) as client:
        stream = client.generate(ask.prompt, max_tokens=ask.max_tokens)
        while True:
            try:
                tokens = await asyncio.wait_for(anext(stream), 0.001)
            except TimeoutError:
                num_given_up += 1
                continue
            except StopAsyncIteration:
                break
            assert tokens.seq == len(ids) + 1
            ids += tokens.ids
    assert ids == ask.ids
    assert num_given_up > 10


CLIENT = """
import asyncio, json, sys
from tokenbus import AsyncClient
async def main():
    async with AsyncClient(zmq=sys.argv[1]) as client:
        async for _ in client.generate("doomed", max_tokens=3000):
            print(json.dumps({"event": "token"}), flush=True)
asyncio.run(main())
"""


async def test_a_killed_client_is_missed_and_its_job_frees_its_blocks(tmp_path: Path) -> None:
    async with open_site(1, ("--set", "fake.step_ms=20", *QUICK)) as site:
        endpoint = site.workers[0].endpoint
        command = [sys.executable, "-c", CLIENT, endpoint]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with Child(command, tmp_path / "client.log", environment) as client:
            await asyncio.to_thread(client.wait_event, "token")
            client.kill()
        await no_blocks_used(endpoint)  # long before its 3,000 steps are over


async def test_rings_too_small_for_the_load_hold_jobs_back_and_lose_none() -> None:
    async with open_site(1, ("--set", "ring_bytes=65536")) as site:
        listener = Listener()
        client = site.zmq()
        for i in range(500):
            listener.generate(client, Ask(f"{i} " + "x" * 500, 4))
        site.submit(500, 4, prompt="y" * 500)
        await listener.audit()
        await site.audit()


async def test_two_clients_racing_with_one_job_id_get_one_job() -> None:
    """The same content a hundred times: whoever asked last has the stream, whole, and once."""
    async with open_site(1, (), start=FAST) as site:
        endpoint = site.workers[0].endpoint
        async with RawClient(endpoint) as one, RawClient(endpoint) as two:
            await one.hello()
            await two.hello()
            for i in range(100):
                ask = Ask(f"race {i}", 5)
                body = {"prompt": ask.prompt, "max_tokens": 5}
                await asyncio.gather(one.submit(f"r{i}", **body), two.submit(f"r{i}", **body))
                for client in (one, two):  # what was on its way is read
                    await client.send(MessageType.PING, t=i)
                    await client.receive(MessageType.PONG)
                state = ""
                while state != "done":
                    await two.send(MessageType.STATS, job=f"r{i}")
                    state = (await two.receive(MessageType.STATS)).body["state"]
                for client in (one, two):
                    await client.send(MessageType.PING, t=i)
                    await client.receive(MessageType.PONG)
                    await client.send(MessageType.RESUME, job=f"r{i}", after=0)
                    reply = (await client.collect(f"r{i}"))[f"r{i}"]
                    assert reply.ids == ask.ids
                await two.submit(f"r{i}", prompt="another", max_tokens=5)
                rejected = await two.receive(MessageType.REJECTED)
                assert rejected.body["code"] == "conflict"
