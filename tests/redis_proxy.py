"""A proxy between a worker and a redis-server, with the faults of a network: replies that never
come, connections that break, a server that accepts and says nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from tests.redis_servers import RedisServer


class RedisProxy:
    """Listens on a free port of loopback. Faults hold until `heal`.

    drop_replies: requests reach the server, answers are swallowed. drop_requests: nothing reaches
    the server. cut_after: break the connection when the server has seen a request that holds these
    bytes, before the answer comes back; once. tls: speak TLS to the client; few redis-servers can.
    """

    def __init__(self, server: RedisServer, tls: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.drop_replies = False
        self.drop_requests = False
        self.cut_after: bytes | None = None
        self.num_cuts = 0

    async def start(self) -> RedisProxy:
        """Open the port."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    @property
    def url(self) -> str:
        """What a worker connects to."""
        assert self._listener is not None, "the proxy is not started"
        scheme = "rediss" if self._tls else "redis"
        return f"{scheme}://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def heal(self) -> None:
        """No more faults."""
        self.drop_replies = self.drop_requests = False
        self.cut_after = None

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """Break everything and stop listening."""
        assert self._listener is not None, "the proxy is not started"
        self._listener.close()
        self.cut()
        await self._listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._server.socket_path)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, up_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, is_request=True),
                self._pump(up_reader, writer, is_request=False),
            )
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_request:
                    if self.drop_requests:
                        continue
                    writer.write(data)
                    await writer.drain()
                    if self.cut_after is not None and self.cut_after in data:
                        self.cut_after = None
                        self.num_cuts += 1
                        await asyncio.sleep(0.05)  # the server executes what it got
                        self.cut()
                elif not self.drop_replies:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
