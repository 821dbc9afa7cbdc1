"""Redis URLs -> where to connect.

| URL | meaning |
|---|---|
| `redis://[user:pass@]host[:6379][/db]` | one server |
| `rediss://...` | the same over TLS; `?ssl_ca_certs=F&ssl_certfile=F&ssl_keyfile=F` |
| `unix:///path[?db=n]` | one server on this host |
| `redis+sentinel://[user:pass@]host:26379,host2/service[/db]` | the master that Sentinel names |
| `redis+cluster://[user:pass@]host:6379,host2` | the cluster node that owns the queue's slot |

`rediss+sentinel://` and `rediss+cluster://` speak TLS to every node. User and password are percent
encoded. All keys of a queue share one slot, so one connection to one node serves a whole queue in a
cluster too; after a failover or a move the link is made anew. Never prints a password.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from tokenbus.errors import InvalidField

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})
_KINDS = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: host and port, or path of a unix socket, and how to greet it."""

    host: str = ""
    port: int = 0
    path: str = ""
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    db: int = 0
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def hello(self) -> list[tuple[str | int, ...]]:
        """Commands that open a session."""
        commands: list[tuple[str | int, ...]] = []
        if self.password:
            login = (self.username, self.password) if self.username else (self.password,)
            commands.append(("AUTH", *login))
        if self.db:
            commands.append(("SELECT", self.db))
        return commands


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. kind: single, sentinel or cluster. seeds: servers to ask first."""

    kind: str
    seeds: tuple[Endpoint, ...]
    service: str = ""  # of Sentinel
    node: Endpoint = field(default_factory=Endpoint)  # login, database and TLS of a data node

    def node_at(self, host: str, port: int) -> Endpoint:
        """The data node at an address that Sentinel or a cluster node named."""
        node = self.node
        return Endpoint(host, port, "", node.username, node.password, node.db, node.ssl_context)

    def __str__(self) -> str:
        servers = ",".join(str(seed) for seed in self.seeds)
        return f"{self.kind} {servers}" + (f" service {self.service}" if self.service else "")


def parse_redis_url(url: str) -> RedisAddress:
    """Raises InvalidField (field `redis`) without repeating the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        kind = _KINDS[parts.scheme]
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        path = [unquote(part) for part in parts.path.split("/") if part]
        service = path.pop(0) if kind == "sentinel" else ""
        tls = _ssl_context(options) if parts.scheme.startswith("rediss") else None
        unix = parts.scheme == "unix"
        db = int(options.pop("db", "0") if unix or not path else path.pop(0))
        node = Endpoint("", 0, "", unquote(username), unquote(password), db, tls)
    except (KeyError, ValueError, IndexError, OSError) as error:
        raise _bad_url(type(error).__name__) from None
    if options or (path and not unix) or (kind == "cluster" and db):
        raise _bad_url(
            f"unknown part {(*options, *path)!r}" if options or path else "db in cluster"
        )
    if unix:
        seeds: tuple[Endpoint, ...] = (
            Endpoint("", 0, unquote(parts.path), node.username, node.password, db),
        )
    else:
        address = RedisAddress(kind, (), service, node)
        port = SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
        seeds = tuple(_seed(address, host, port) for host in hosts.split(","))
    return RedisAddress(kind, seeds, service, node)


def _seed(address: RedisAddress, text: str, default_port: int) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "localhost", parts.port or default_port
    except ValueError as error:
        raise _bad_url(str(error)) from None
    if address.kind == "sentinel":  # Sentinels have no database, and seldom the servers' login
        return Endpoint(host, port, ssl_context=address.node.ssl_context)
    return address.node_at(host, port)


def _ssl_context(options: dict[str, str]) -> ssl.SSLContext:
    chosen = {name: options.pop(name) for name in list(options) if name in _TLS_OPTIONS}
    context = ssl.create_default_context(cafile=chosen.get("ssl_ca_certs"))
    if "ssl_certfile" in chosen:
        context.load_cert_chain(chosen["ssl_certfile"], chosen.get("ssl_keyfile"))
    if chosen.get("ssl_check_hostname", "true").lower() in ("false", "0", "no"):
        context.check_hostname = False
    return context


def _bad_url(reason: str) -> InvalidField:
    forms = "redis://, rediss://, unix://, redis+sentinel://hosts/service or redis+cluster://hosts"
    return InvalidField(f"redis: not a Redis URL ({reason}); expected {forms}", field="redis")
