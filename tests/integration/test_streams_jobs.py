"""Jobs through the Redis door on real servers: the plain way, bad input, duplicates, cancel."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.redis_servers import RedisServer
from tests.streams_kit import Bus, open_bus, text_of, until


@pytest.fixture
async def bus(shared_redis: RedisServer) -> AsyncIterator[Bus]:
    async with open_bus(shared_redis) as bus:
        yield bus


async def test_a_plain_xadd_becomes_started_tokens_done(bus: Bus) -> None:
    worker = await bus.worker()
    worker.ledger.is_automatic = True
    job = bus.submit(max_tokens=20)
    done = await until(lambda: bus.terminal(job))
    entries = bus.out(job)
    assert entries[0][0] == "1-0"
    assert entries[0][1]["event"] == "started"
    assert entries[0][1]["prompt_tokens"] == "5"
    assert entries[-1][0] == "1-21"
    assert done["reason"] == "length"
    assert bus.text(job) == text_of(20)
    bus.audit(job)
    bus.audit_queue()
    assert bus.state(job)["state"] == "done"
