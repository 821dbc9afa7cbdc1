"""A TCP proxy under control: delay, stall, swallow or cut, either direction, any frame.

It runs on an event loop in a thread of its own, so synchronous and asynchronous tests drive it
alike, and every control method returns when the fault is in force.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ops.bench.chaos_framing import Framer, RawFramer

MAX_HELD_FRAMES = 4096


class Direction:
    """One direction of all connections, and the faults on it. Set the fields through the proxy."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.is_swallowing = False
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.cut_when: Callable[[bytes], bool] | None = None
        self.is_cut_after = False
        self.frames = 0  # forwarded
        self.swallowed = 0


class _Connection:
    """Both sockets of one proxied connection."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.writers = writers
        self.has_lost_bytes = False
        self.is_cut = False

    def end(self) -> None:
        """Close both sides after what was forwarded; a reset might discard it."""
        self.is_cut = True
        for writer in self.writers:
            writer.close()

    def cut(self) -> None:
        """Reset both sides: the peers see an error, not an orderly end."""
        self.is_cut = True
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class TcpProxy:
    """Listens on a free port of loopback and forwards to `upstream`.

    upstream: (host, port), or the path of a unix socket.
    framer: how each direction is cut into frames; see `framing`.

    Directions are `up` (client to server) and `down`. `heal` ends every fault.
    """

    def __init__(
        self, upstream: tuple[str, int] | str, framer: Callable[[], Framer] = RawFramer
    ) -> None:
        self._upstream = upstream
        self._make_framer = framer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy")
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_refusing = False
        self.up = Direction()
        self.down = Direction()
        self.accepted = 0
        self.cuts = 0
        self._thread.start()
        self._server: asyncio.Server = self._on_loop(
            asyncio.start_server, self._accept, "127.0.0.1", 0, backlog=1024
        )
        self.port: int = self._server.sockets[0].getsockname()[1]

    def delay(self, direction: Direction, seconds: float) -> None:
        """Every frame arrives this much later; order and rate stay."""
        self._set(direction, "delay_s", seconds)

    def stall(self, direction: Direction) -> None:
        """A black hole that may heal: bytes are held, connections stay open, nothing arrives."""
        self._call(direction.is_open.clear)

    def swallow(self, direction: Direction) -> None:
        """A black hole for good: bytes vanish. `heal` cuts the connections that lost some."""
        self._set(direction, "is_swallowing", True)

    def cut_at(
        self, direction: Direction, matches: Callable[[bytes], bool], *, after: bool
    ) -> None:
        """Cut the connection at the next frame that matches: once, before or after it passed."""
        self._set(direction, "is_cut_after", after)
        self._set(direction, "cut_when", matches)

    def cut(self) -> None:
        """Reset every connection that is open now."""
        self._call(self._cut_all)

    def refuse(self) -> None:
        """Reset every new connection at once, as a port without a listener does."""
        self._call(setattr, self, "_is_refusing", True)

    def heal(self) -> None:
        """No more faults. Held bytes flow on."""
        self._call(self._heal)

    def close(self) -> None:
        """Cut everything and stop. May be called again."""
        if not self._thread.is_alive():
            return
        self._on_loop(self._shut_down)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # The rest runs on the loop's thread.

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            if self._is_refusing:
                raise ConnectionRefusedError
            if isinstance(self._upstream, str):
                up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
            else:
                up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            _Connection(writer).cut()
            return
        connection = _Connection(writer, up_writer)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(self.up, reader, up_writer, connection),
                self._pump(self.down, up_reader, writer, connection),
            )
        finally:
            self._connections.discard(connection)
            for each in connection.writers:
                each.transport.abort()

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: _Connection,
    ) -> None:
        """Read frames into a queue with the time each is due; a second task forwards them."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_HELD_FRAMES)
        framer = self._make_framer()
        forward = self._loop.create_task(self._forward(direction, queue, writer, connection))
        try:
            while data := await reader.read(1 << 16):
                for frame in framer.feed(data):
                    await queue.put((self._loop.time() + direction.delay_s, frame))
            await queue.put((self._loop.time() + direction.delay_s, b""))
            await forward
        except OSError:
            connection.cut()  # one side broke: so does the other
        finally:
            forward.cancel()

    async def _forward(
        self,
        direction: Direction,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        connection: _Connection,
    ) -> None:
        while not connection.is_cut:
            due_s, frame = await queue.get()
            await asyncio.sleep(max(due_s - self._loop.time(), 0))
            await direction.is_open.wait()
            if not frame:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            is_cut = direction.cut_when is not None and direction.cut_when(frame)
            if is_cut:
                direction.cut_when = None
            if direction.is_swallowing:
                direction.swallowed += 1
                connection.has_lost_bytes = True
            elif not is_cut or direction.is_cut_after:
                try:
                    writer.write(frame)
                    await writer.drain()
                except OSError:
                    connection.cut()
                    return
                direction.frames += 1
            if is_cut:
                self.cuts += 1
                connection.end()

    def _cut_all(self) -> None:
        for connection in list(self._connections):
            self.cuts += 1
            connection.cut()

    def _heal(self) -> None:
        self._is_refusing = False
        for direction in (self.up, self.down):
            direction.delay_s = 0.0
            direction.is_swallowing = False
            direction.cut_when = None
            direction.is_open.set()
        for connection in list(self._connections):
            if connection.has_lost_bytes:
                connection.cut()

    async def _shut_down(self) -> None:
        self._server.close()
        self._heal()
        self._cut_all()
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The next three carry calls over to that thread.

    def _set(self, direction: Direction, name: str, value: object) -> None:
        self._call(setattr, direction, name, value)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        done: Future[None] = Future()

        def run() -> None:
            function(*args)
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(10)

    def _on_loop(self, function: Callable[..., Any], *args: object, **options: object) -> Any:
        coroutine = function(*args, **options)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)
