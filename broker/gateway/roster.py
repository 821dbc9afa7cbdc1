"""Who is connected, and as whom. Knows no job."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import structlog

from broker.gateway.sessions import Client, Peer
from tokenbus.bodies import Hello

log = structlog.get_logger("broker.gateway")


class Roster:
    """tenants: whose each CURVE key is; None where connections are in clear text."""

    def __init__(self, tenants: Mapping[bytes, str] | None) -> None:
        self._tenants = tenants
        self._peers: dict[bytes, Peer] = {}
        self._clients: dict[str, Client] = {}

    @property
    def clients(self) -> Collection[Client]:
        """Everybody who said HELLO and is not gone."""
        return self._clients.values()

    def num_muted(self, now_s: float) -> int:
        """Connections that are ignored now."""
        return sum(peer.muted_until_s > now_s for peer in self._peers.values())

    def hear(self, routing_id: bytes, now_s: float) -> Peer:
        """Something came from this connection."""
        peer = self._peers.get(routing_id)
        if peer is None:
            peer = self._peers[routing_id] = Peer(routing_id, now_s)
        peer.last_heard_s = now_s
        if peer.client is not None:
            peer.client.last_heard_s = now_s
        return peer

    def greet(self, peer: Peer, hello: Hello, key: bytes) -> None:
        """HELLO: a client is on this connection from now on. key: its CURVE key, or empty."""
        tenant = hello.tenant
        if self._tenants is not None:
            tenant = self._tenants.get(key, "") or tenant
        name = f"{key.decode()}/{hello.client}" if key else hello.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name)
        if peer.client is not None and peer.client is not client:
            peer.client.peer = None  # the connection speaks for another client from now on
        if client.peer is not None and client.peer is not peer:
            log.info("client.moved", client=hello.client)
            client.peer.client = None
        client.begin_session(peer, hello.credit, tenant, peer.last_heard_s)
        log.info("client.hello", client=hello.client, tenant=tenant, agent=hello.agent)

    def remove_gone(self, now_s: float, gone_s: float) -> Iterator[Client]:
        """Forget who has been silent for so long; the clients among them."""
        for client in list(self._clients.values()):
            if now_s - client.last_heard_s > gone_s:
                client.peer = None
                client.is_gone = True
                del self._clients[client.name]
                yield client
        for routing_id, peer in list(self._peers.items()):
            if now_s - peer.last_heard_s > gone_s and now_s >= peer.muted_until_s:
                del self._peers[routing_id]

    def silent(self, now_s: float, heartbeat_s: float) -> Iterator[Peer]:
        """Connections of clients from whom nothing came for so long."""
        for client in self._clients.values():
            if client.peer is not None and now_s - client.last_heard_s > heartbeat_s:
                yield client.peer
