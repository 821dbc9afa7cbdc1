"""Mutated frames at the gateway: each is answered or ignored, none disturbs a well-behaved client.

FUZZ_FRAMES sets how many (default 20,000); the seed is fixed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker.actor import ActorSystem
from broker.config import BrokerConfig, ZmqConfig
from broker.gateway import actor as gateway_module
from broker.gateway.router import Sent
from broker.ledger.actor import LedgerActor
from broker.link_messages import EngineUp
from broker.text.actor import TextActor
from broker.text.model import load_text_model
from tokenbus.protocol import MessageType, encode_trusted

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
KNOWN_CODES = {
    "invalid", "bad_frame", "version", "unsupported", "too_large", "too_long", "unknown_model",
    "unknown_queue", "not_found", "conflict", "gone", "busy", "no_session",
}  # fmt: skip


class StubRouter:
    """Remembers what was sent; every peer takes everything."""

    endpoint = "stub"

    def __init__(self, *_: Any) -> None:
        self.sent: list[tuple[bytes, MessageType, dict[str, Any]]] = []

    def start(self, receive: Any, guard: Any) -> None:
        self.receive = receive

    def send(self, peer: bytes, frames: list[bytes]) -> Sent:
        self.sent.append((peer, MessageType(frames[0][3]), msgpack.unpackb(frames[1])))
        return Sent.OK

    def close(self) -> None:
        """Nothing to free."""


class NoLink:
    """An engine link without an engine."""

    def tell(self, message: object) -> bool:
        return True


def corpus() -> list[list[bytes]]:
    """Frames of the golden vectors, well-formed and malformed."""
    frames = []
    for name in ("frames.json", "malformed.json"):
        data = json.loads((VECTORS / name).read_text())
        cases = data["cases"] if isinstance(data, dict) else data
        frames += [[bytes.fromhex(f) for f in case["frames"]] for case in cases]
    return [f for f in frames if f and sum(map(len, f)) < 20_000]


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One to four small damages: bits, bytes, lengths, frames."""
    parts = [bytearray(f) for f in frames]
    for _ in range(rng.randint(1, 4)):
        part = rng.choice(parts)
        kind = rng.randrange(7)
        at = rng.randrange(len(part) + 1)
        if kind == 0 and part:
            part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        elif kind == 1 and part:
            part[rng.randrange(len(part))] = rng.choice((0xC0, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF, 0x90))
        elif kind == 2:
            part[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:
            del part[at : at + rng.randint(1, 9)]
        elif kind == 4:
            parts.append(bytearray(rng.randbytes(rng.randrange(12))))
        elif kind == 5 and len(parts) > 1:
            parts.pop(rng.randrange(len(parts)))
        elif len(parts) > 1:
            parts[1] = bytearray(rng.choice(parts))
    return [bytes(p) for p in parts]


async def test_no_mutated_frame_stops_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "Router", StubRouter)
    monkeypatch.setattr("broker.gateway.sessions.STRIKES_WITHIN_S", -1.0)  # nobody is muted
    system = ActorSystem(asyncio.get_running_loop())
    config = BrokerConfig(
        "w", "q", "", "fake", "", zmq=ZmqConfig("ipc:///x", retain_jobs=50), fake_vocab_size=100
    )
    model = load_text_model("", 100)
    text = TextActor(system, config, model)
    ledger = LedgerActor(system, config.limits, model.vocabulary, NoLink())
    gateway = gateway_module.GatewayActor(system, config, model.vocabulary, None, text, ledger)
    ledger.add_door(gateway)
    system.start()
    ledger.tell(EngineUp(100, 1000, 4, (), 1, {}))
    router: StubRouter = gateway._router  # type: ignore[assignment]
    rng = random.Random(20_26)
    seeds = corpus()
    hello = encode_trusted(MessageType.HELLO, {"client": "c" * 20, "credit": 5})
    count = int(os.environ.get("FUZZ_FRAMES", "20000"))
    for i in range(count):
        peer = b"fuzz-%d" % (i % 20)
        if i % 50 < 20:
            router.receive(peer, hello, b"")
        router.receive(peer, mutate(rng.choice(seeds), rng), b"")
        if i % 100 == 0:
            for _ in range(6):
                await asyncio.sleep(0)
            assert not system.crashed.done(), system.crashed.result()
    good = encode_trusted(MessageType.HELLO, {"client": "g" * 20, "credit": 5})
    router.receive(b"good", good, b"")
    router.receive(b"good", encode_trusted(MessageType.PING, {"t": 7}), b"")
    mine = [(kind, body) for peer, kind, body in router.sent if peer == b"good"]
    assert [kind for kind, _ in mine] == [MessageType.WELCOME, MessageType.PONG]
    codes = {body["code"] for _, kind, body in router.sent if "code" in body}
    assert codes <= KNOWN_CODES
    assert {"bad_frame", "invalid", "unsupported"} <= codes
    await system.stop()
