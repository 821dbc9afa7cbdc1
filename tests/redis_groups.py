"""Several redis-servers that belong together: a cluster of two, a master with a replica and a
Sentinel that watches them.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis

from tests.redis_servers import RedisServer, ServerBinary
from tests.streams_kit import until

SLOTS = 16_384
HALF = SLOTS // 2


@asynccontextmanager
async def cluster_of_two(binary: ServerBinary) -> AsyncIterator[tuple[RedisServer, RedisServer]]:
    """The first node has the lower half of the slots."""
    first, second = _start_node(binary), _start_node(binary)
    try:
        with first.client() as one, second.client() as two:
            one.execute_command("CLUSTER", "ADDSLOTS", *range(HALF))
            two.execute_command("CLUSTER", "ADDSLOTS", *range(HALF, SLOTS))
            one.execute_command("CLUSTER", "MEET", "127.0.0.1", second.port)
            for node in (one, two):
                await until(lambda n=node: n.cluster("info")["cluster_state"] == "ok", 20)
                await until(lambda n=node: n.cluster("info")["cluster_known_nodes"] == "2", 20)
        yield first, second
    finally:
        first.close()
        second.close()


def _start_node(binary: ServerBinary) -> RedisServer:
    """Nodes talk to each other on their port + 10,000; Redis 6.2 knows no other."""
    while True:
        server = RedisServer(binary, tcp=True, extra=("--cluster-enabled", "yes"))
        if server.port < 65_536 - 10_000:
            return server.start()
        server.close()


@dataclass(frozen=True)
class Watched:
    """A master with its replica; `url` is that of the Sentinel that watches them."""

    master: RedisServer
    replica: RedisServer
    url: str


@asynccontextmanager
async def watched_pair(binary: ServerBinary) -> AsyncIterator[Watched]:
    """Killing the master makes the replica the new one within a few seconds."""
    master, replica = (RedisServer(binary, tcp=True).start() for _ in range(2))
    sentinel = RedisServer(binary, tcp=True)
    config = sentinel.dir / "sentinel.conf"
    config.write_text(
        f"port {sentinel.port}\nunixsocket {sentinel.socket_path}\n"
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 600\nsentinel failover-timeout main 2000\n"
    )
    argv = [binary.path, str(config), "--sentinel"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        with replica.client() as client:
            client.replicaof("127.0.0.1", master.port)
        with sentinel.client() as client:
            await until(lambda: _sees_replica(client), timeout_s=20)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main"  # one is dead
        yield Watched(master, replica, url)
    finally:
        process.kill()
        process.wait()
        for server in (master, replica, sentinel):
            server.close()


def _sees_replica(sentinel: redis.Redis) -> bool:
    try:
        return bool(sentinel.execute_command("SENTINEL", "REPLICAS", "main"))
    except redis.RedisError:  # it is not up yet
        return False
