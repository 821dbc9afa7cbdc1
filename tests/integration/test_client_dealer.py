"""The client's socket against libzmq's own delays."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from tests.integration.fake_worker import FakeWorker
from tokenbus import AsyncClient, Timeouts, dealer
from tokenbus.parts import receive_parts, send_parts
from tokenbus.protocol import MessageType as T


def send_only_after_receiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libzmq does for a millisecond: only receiving takes note of a new connection."""
    is_noted = False

    def forget() -> None:
        nonlocal is_noted
        is_noted = False

    def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
        nonlocal is_noted
        is_noted = True
        asyncio.get_running_loop().call_soon(forget)
        return receive_parts(socket)

    def send(socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
        if not is_noted:
            raise zmq.Again
        send_parts(socket, parts)

    monkeypatch.setattr(dealer, "receive_parts", receive)
    monkeypatch.setattr(dealer, "send_parts", send)


async def test_what_waits_for_a_connection_goes_out_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dealer, "_RETRY_S", 60.0)
    send_only_after_receiving(monkeypatch)
    timeouts = Timeouts(connect_s=5.0, answer_s=5.0, give_up_s=1.0)
    async with (
        FakeWorker() as worker,
        AsyncClient(zmq=worker.endpoint, timeouts=timeouts) as client,
    ):
        reading = asyncio.create_task(client.generate("p", job="j").text())
        await worker.expect(T.SUBMIT)
        await worker.accept("j", seed=7)
        await worker.tokens(("j", 1, [5], "a"))
        await worker.done("j", [5])
        assert await reading == "a"
