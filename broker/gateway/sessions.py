"""Connections and the clients behind them. Knows credit, silence and bad manners; no job's content.

A *peer* is one connection, named by the routing id that ROUTER chose. A *client* is who said HELLO
on it, named by itself; its newest HELLO owns its streams, so a client that reconnects finds its
jobs again, and two that share a name do not get each other's halves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenbus.errors import InvalidField
from tokenbus.request import JobRequest

if TYPE_CHECKING:
    from broker.gateway.stream import Stream

STRIKES = 10  # bad messages ...
STRIKES_WITHIN_S = 10.0  # ... in this time ...
MUTE_S = 30.0  # ... and the peer is ignored for that long
MAX_PENDING = 10_000  # answers that wait for a peer that takes no more
MAX_REFUSALS = 5  # from then on a full peer is tried every 32nd turn


class Peer:
    """One connection."""

    __slots__ = ("_strikes", "client", "is_blocked", "last_heard_s", "muted_until_s",
                 "num_refusals", "num_skips", "pending", "routing_id")  # fmt: skip

    def __init__(self, routing_id: bytes, now_s: float) -> None:
        self.routing_id = routing_id
        self.client: Client | None = None
        self.last_heard_s = now_s
        self.muted_until_s = 0.0
        self.is_blocked = False  # its queue was full at the last send
        self.num_refusals = 0  # tries in a row that found it still full
        self.num_skips = 0  # turns that pass before the next try
        self.pending: deque[list[bytes]] = deque()  # answers that must not be lost
        self._strikes: deque[float] = deque(maxlen=STRIKES)

    def refuse(self) -> None:
        """It is still full: twice as many turns pass before the next try as before this one."""
        self.num_skips = (1 << self.num_refusals) - 1
        self.num_refusals = min(self.num_refusals + 1, MAX_REFUSALS)

    def strike(self, now_s: float) -> bool:
        """Count a bad message; True if the peer is muted from now on."""
        self._strikes.append(now_s)
        if len(self._strikes) == STRIKES and now_s - self._strikes[0] <= STRIKES_WITHIN_S:
            self.muted_until_s = now_s + MUTE_S
            self._strikes.clear()
            return True
        return False


class Client:
    """Who owns streams. Credit counts TOKENS events of the present session."""

    __slots__ = ("came_s", "credit", "is_gone", "last_heard_s", "name", "peer", "streams", "tenant",
                 "used", "waiting")  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.tenant = ""
        self.peer: Peer | None = None
        self.last_heard_s = 0.0
        self.came_s = 0.0  # when this session began
        self.is_gone = False  # for good: who comes by this name again is another
        self.credit = 0
        self.used = 0
        self.streams: dict[str, Stream] = {}
        self.waiting: dict[str, Stream] = {}  # streams with something to send, in order

    def begin_session(self, peer: Peer, credit: int, tenant: str, now_s: float) -> None:
        """A HELLO came: this peer owns the streams, and the count of credit begins anew."""
        self.peer = peer
        peer.client = self
        self.tenant = tenant
        self.credit = credit
        self.used = 0
        self.last_heard_s = self.came_s = now_s
        self.waiting.clear()
        for stream in self.streams.values():
            stream.is_attached = False  # until RESUME or SUBMIT says from where


def with_tenant(request: JobRequest, client: Client, has_keys: bool) -> JobRequest:
    """The request in its client's name. Raises InvalidField for one in another tenant's, where
    clients have keys.
    """
    if not request.tenant:
        return replace(request, tenant=client.tenant) if client.tenant else request
    if has_keys and client.tenant and request.tenant != client.tenant:
        raise InvalidField(f"tenant: this key is {client.tenant!r}'s", field="tenant")
    return request
