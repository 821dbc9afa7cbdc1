"""Connections to Redis for the client: by URL, with explicit timeouts and bounded retries.

redis-py's own retries turn a timeout of 3 s into half a minute, so they are off; `RedisLink.call`
retries instead. A command in flight is never cancelled: the next one on that connection would get
its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from redis import exceptions
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from tokenbus.errors import BusUnavailable, Internal, InvalidField
from tokenbus.retry import Backoff

AnyRedis = Redis | RedisCluster
LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, asyncio.TimeoutError)
_ATTEMPTS = 4


def connect(url: str, socket_timeout_s: float, connect_timeout_s: float) -> AnyRedis:
    """A client for one server, Sentinel or a cluster.

    URLs: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host,host2/service[/db]`,
    `redis+cluster://host,host2`. Nothing is sent yet. Raises InvalidField (field `redis`) without
    the URL, which may hold a password.
    """
    options: dict[str, Any] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "protocol": 2,
    }
    try:
        scheme = urlsplit(url).scheme
        if scheme.endswith("+cluster"):
            return _cluster(url, options)
        options["retry"] = Retry(NoBackoff(), 0)
        if scheme.endswith("+sentinel"):
            return _sentinel(url, options)
        return Redis.from_url(url, **options)
    except (ValueError, TypeError) as error:
        message = f"redis: not a Redis URL ({type(error).__name__})"
        raise InvalidField(message, field="redis") from None


def _parts(url: str, default_port: int) -> tuple[list[tuple[str, int]], list[str], dict[str, Any]]:
    """Hosts, path parts and login options of a URL with several hosts."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    options: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    if password:
        options |= {"username": unquote(username) or None, "password": unquote(password)}
    nodes = []
    for host in hosts.split(","):
        node = urlsplit(f"//{host}")
        nodes.append((node.hostname or "localhost", node.port or default_port))
    return nodes, [unquote(p) for p in parts.path.split("/") if p], options


def _cluster(url: str, options: dict[str, Any]) -> RedisCluster:
    nodes, _, login = _parts(url, 6379)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in nodes], **options, **login
    )


def _sentinel(url: str, options: dict[str, Any]) -> Redis:
    nodes, path, login = _parts(url, 26379)
    if not path:
        raise ValueError("no service name")
    db = int(path[1]) if len(path) > 1 else 0
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        nodes, sentinel_kwargs=options, **options, **login
    )
    client: Redis = sentinel.master_for(path[0], db=db)
    return client


class RedisLink:
    """One client whose commands are retried over broken connections, and whose errors are ours."""

    def __init__(self, client: AnyRedis, name: str) -> None:
        self.client = client
        self._name = name

    async def call(self, command: Callable[[], Awaitable[Any]], attempts: int = _ATTEMPTS) -> Any:
        """Run a command that may safely run twice. Raises BusUnavailable or Internal."""
        backoff = Backoff(0.05, 1.0)
        while True:
            attempts -= 1
            try:
                return await asyncio.shield(asyncio.ensure_future(command()))
            except LOST as error:
                if attempts <= 0:
                    raise BusUnavailable(f"Redis ({self._name}): {error}") from error
            except exceptions.AuthenticationError as error:
                raise BusUnavailable(f"Redis ({self._name}): {error}") from error
            except exceptions.RedisError as error:
                if attempts <= 0 or not _is_passing(error):
                    raise _typed(error, self._name) from error
            await asyncio.sleep(backoff.next_s())

    async def close(self) -> None:
        """Close the connections, in use or not."""
        await close(self.client)


async def close(client: AnyRedis) -> None:
    """Close a client's connections, those to Sentinels too: redis-py leaves them open."""
    await client.aclose()
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _is_passing(error: exceptions.RedisError) -> bool:
    """Redis is loading, failing over or short of disk: the same command may succeed soon."""
    text = str(error)
    passing = ("LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "UNBLOCKED")
    return isinstance(error, exceptions.BusyLoadingError) or text.startswith(passing)


def _typed(error: exceptions.RedisError, name: str) -> BusUnavailable | Internal:
    text = str(error)
    if _is_passing(error) or text.startswith(("MISCONF", "OOM", "command not allowed when used")):
        return BusUnavailable(f"Redis ({name}): {text}", retry_ms=1_000)
    return Internal(f"Redis ({name}): {text}")
