"""The link to Redis: four lanes to one server, made anew after every loss, and an honest state.

`commands` carries everything that answers at once; `reader`, `control` and `relay` block. Whatever
breaks a lane breaks the link: all are closed, the server is looked up again (after a failover it is
another one) and checked, the owner's `on_up` runs (leases first), and only then is the link up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from broker.streams.address import Endpoint, RedisAddress
from broker.streams.lane import Command, Lane, LinkLost, Reply, ReplyError
from broker.streams.scripts import load_commands
from tokenbus.errors import BusUnavailable, TokenbusError, Unsupported

log = structlog.get_logger("broker.streams")

OLDEST_VERSION = (6, 2)
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 0.5


class Link:
    """keep() holds it up for ever; `up` says whether it is.

    on_up runs on a fresh connection before anything else may use it; on_down(reason) when the link
    breaks or cannot be made.
    """

    def __init__(
        self,
        address: RedisAddress,
        slot_key: str,
        timeout_s: float,
        on_up: Callable[[], Awaitable[None]],
        on_down: Callable[[str], None],
    ) -> None:
        self.up = asyncio.Event()
        self.is_starting = True  # the first connection is being made, and nothing has failed yet
        self.server_version = ""
        self.reader_id = self.relay_id = 0  # the server's numbers of the lanes, to unblock them
        self._address = address
        self._slot_key = slot_key
        self._timeout_s = timeout_s
        self._on_up = on_up
        self._on_down = on_down
        self._lanes: list[Lane] = []
        self._was_up = False

    @property
    def reader(self) -> Lane:
        """Lane for the blocking read of jobs."""
        return self._lane(1)

    @property
    def control(self) -> Lane:
        """Lane for the blocking read of the control stream."""
        return self._lane(2)

    @property
    def relay(self) -> Lane:
        """Lane for the blocking read of reply streams."""
        return self._lane(3)

    async def keep(self) -> None:
        """Connect, wait for the end of the connection, connect again.

        Raises Unsupported if the first server reached is unfit (its text says what to change).
        """
        delay_s = FIRST_RETRY_S
        while True:
            try:
                await self._connect()
                up_since = time.monotonic()
                lost = [lane.lost for lane in self._lanes]
                await asyncio.wait(lost, return_when=asyncio.FIRST_COMPLETED)
                reason = "connection lost"
                if time.monotonic() - up_since > LAST_RETRY_S:
                    delay_s = FIRST_RETRY_S
            except (LinkLost, ReplyError, TokenbusError) as error:
                if isinstance(error, Unsupported) and not self._was_up:
                    raise
                reason = str(error)
            finally:
                self.close()
            self.is_starting = False
            self._on_down(reason)
            await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    async def run(self, commands: Iterable[Command]) -> list[Reply]:
        """A batch on the command lane; error replies stand in the list. Scripts that the server
        forgot are loaded again. Raises LinkLost.
        """
        batch = list(commands)
        lane = self._lane(0)
        replies = await lane.run(batch)
        missing = [i for i, reply in enumerate(replies) if _has_code(reply, "NOSCRIPT")]
        if missing:
            again = await lane.run([*load_commands(), *(batch[i] for i in missing)])
            for i, reply in zip(missing, again[-len(missing) :], strict=True):
                replies[i] = reply
        if any(_has_code(reply, "MOVED", "ASK", "READONLY") for reply in replies):
            self.drop("the server is no longer the master of this queue")
        return replies

    async def call(self, *command: str | bytes | int) -> Reply:
        """One command on the command lane. Raises LinkLost or ReplyError."""
        reply = (await self.run((command,)))[0]
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def drop(self, reason: str) -> None:
        """Break the link, so that it is made anew."""
        log.warning("redis.dropped", reason=reason)
        for lane in self._lanes:
            lane.close(reason)

    def close(self) -> None:
        """Close the lanes. `keep` goes on unless its task is cancelled."""
        self.up.clear()
        for lane in self._lanes:
            lane.close()
        self._lanes = []

    # ------------------------------------------------------------ inside

    def _lane(self, index: int) -> Lane:
        if not self._lanes:
            raise LinkLost("not connected")
        return self._lanes[index]

    async def _connect(self) -> None:
        endpoint = await self._find_server()
        for _ in range(4):
            self._lanes.append(await Lane.connect(endpoint, self._timeout_s))
        await self._check(endpoint)
        for reply in await self._lanes[0].run(load_commands()):
            if isinstance(reply, ReplyError):
                raise reply
        self.reader_id, self.relay_id = (
            await self._id_of(self.reader),
            await self._id_of(self.relay),
        )
        await self._on_up()
        self._was_up = True
        self.is_starting = False
        self.up.set()
        log.info("redis.connected", server=str(endpoint), version=self.server_version)

    async def _id_of(self, lane: Lane) -> int:
        """The server's number of a connection; 0 where the user may not ask."""
        reply = (await lane.run([("CLIENT", "ID")]))[0]
        return 0 if isinstance(reply, ReplyError) else int(reply)

    async def _check(self, endpoint: Endpoint) -> None:
        """The server is fit to hold jobs. Raises Unsupported or BusUnavailable."""
        info: dict[str, str] = {}
        sections = [("INFO", name) for name in ("server", "memory", "replication", "persistence")]
        for reply in await self._lanes[0].run(sections):
            if isinstance(reply, ReplyError):
                raise reply
            lines = (line.partition(":") for line in reply.decode().splitlines())
            info.update({name: value for name, _, value in lines})
        self.server_version = info.get("redis_version", "0")
        version = tuple(int(part) for part in self.server_version.split(".")[:2])
        if version < OLDEST_VERSION:
            raise Unsupported(
                f"Redis at {endpoint} is {self.server_version}; 6.2 or later is needed"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise Unsupported(
                f"Redis at {endpoint} has maxmemory-policy {policy}, which may evict jobs and "
                "tokens. Run: redis-cli CONFIG SET maxmemory-policy noeviction (also in redis.conf)"
            )
        if info.get("loading") == "1":
            raise BusUnavailable(f"Redis at {endpoint} is loading its data")
        if info.get("role") == "slave":
            raise BusUnavailable(f"Redis at {endpoint} is a replica; waiting for a master")

    async def _find_server(self) -> Endpoint:
        address = self._address
        if address.kind == "single":
            return address.seeds[0]
        errors = []
        for seed in address.seeds:
            lane = None
            try:
                lane = await Lane.connect(seed, self._timeout_s)
                if address.kind == "sentinel":
                    return await self._ask_sentinel(lane)
                return await self._ask_cluster(lane, seed)
            except (LinkLost, ReplyError, BusUnavailable) as error:
                errors.append(f"{seed}: {error}")
            finally:
                if lane is not None:
                    lane.close()
        raise BusUnavailable(f"no {address.kind} node answers: {'; '.join(errors)}")

    async def _ask_sentinel(self, lane: Lane) -> Endpoint:
        service = self._address.service
        found = await lane.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        if not found:
            raise BusUnavailable(f"Sentinel knows no service {service!r}")
        return self._address.node_at(found[0].decode(), int(found[1]))

    async def _ask_cluster(self, lane: Lane, seed: Endpoint) -> Endpoint:
        slot = await lane.call("CLUSTER", "KEYSLOT", self._slot_key)
        for first, last, master, *_ in await lane.call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                host = (master[0] or b"").decode() or seed.host
                return self._address.node_at(host, int(master[1]))
        raise BusUnavailable(f"no cluster node serves slot {slot}")


def _has_code(reply: Reply, *codes: str) -> bool:
    return isinstance(reply, ReplyError) and reply.code in codes


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set or the time is over; whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
