"""`tokenbus doctor`: every thing a worker needs from this machine, checked one by one.

A check never raises for what it looks at: the answer is a finding, with the remedy in it.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from broker.http_server import split_address
from ops import embedded_redis, models
from ops.exit_codes import CommandError
from ops.settings import FAKE_MODEL, Settings, public_url

_MIN_FREE_BYTES = 2 << 30
_MAX_CLOCK_SKEW_S = 1.0


class Level(StrEnum):
    """How good a finding is."""

    GOOD = "ok"
    NOTE = "note"  # works, but worth knowing
    BAD = "bad"  # a worker will not start, or will break a promise


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    what: str
    text: str
    remedy: str = ""


def examine(settings: Settings) -> list[Finding]:
    """All checks, in the order of the report."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        lambda: _gpu(settings),
        lambda: _redis(settings),
        lambda: _port(settings),
        lambda: _pages(settings),
        lambda: _disk(settings),
        lambda: _model(settings),
    ]
    return [finding for check in checks for finding in check()]


def _python() -> list[Finding]:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.platform != "linux":
        remedy = "Workers run on Linux; clients run anywhere."
        return [Finding(Level.BAD, "python", f"{text}, on {sys.platform}", remedy)]
    return [Finding(Level.GOOD, "python", f"{text}, {os.cpu_count()} cores")]


def _packages() -> list[Finding]:
    findings = []
    for name in ("torch", "triton"):
        try:
            findings.append(Finding(Level.GOOD, name, version(name)))
        except PackageNotFoundError:
            level = Level.BAD if name == "torch" else Level.NOTE
            remedy = f"pip install {name}" + ("" if name == "torch" else "; only a GPU needs it")
            findings.append(Finding(level, name, "not installed", remedy))
    return findings


def _gpu(settings: Settings) -> list[Finding]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        reason = "no NVIDIA driver" if not Path("/dev/nvidia0").exists() else "torch has no CUDA"
        if settings.device == "cuda":
            remedy = "Mend the driver or torch's build, or take --device auto."
            return [Finding(Level.BAD, "gpu", f"none ({reason}), and device is cuda", remedy)]
        return [Finding(Level.NOTE, "gpu", f"none ({reason}); the engine runs on the CPU")]
    findings = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        if (gpu.major, gpu.minor) < (8, 0):
            remedy = "bfloat16 needs compute capability 8.0; use --device cpu or another GPU."
            findings.append(Finding(Level.NOTE, "gpu", text, remedy))
        else:
            findings.append(Finding(Level.GOOD, "gpu", text))
    return findings


# ---------------------------------------------------------------- redis


def _redis(settings: Settings) -> list[Finding]:
    if settings.redis_mode == "none":
        return [Finding(Level.NOTE, "redis", "off: no durable jobs, no second worker")]
    if settings.redis_mode == "embedded":
        try:
            binary = embedded_redis.find_binary()
        except CommandError as error:
            return [Finding(Level.BAD, "redis", error.message, error.remedy)]
        found = embedded_redis.binary_version(binary) or (0, 0)
        text = f"embedded {found[0]}.{found[1]}, {binary}"
        return [Finding(Level.GOOD, "redis", text)]
    return _redis_server(settings.redis.get_secret_value())


def _redis_server(url: str) -> list[Finding]:
    from redis import Redis, RedisError

    where = public_url(url)
    try:
        with Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as redis:
            info: Any = redis.info()
            server_seconds, server_micros = redis.time()
    except (RedisError, OSError, ValueError) as error:
        remedy = "Check host, port, password and TLS (rediss://), and that the server runs."
        return [Finding(Level.BAD, "redis", f"{where}: {error}", remedy)]
    return [
        _redis_version(where, str(info.get("redis_version", "0"))),
        _redis_eviction(str(info.get("maxmemory_policy", "unknown"))),
        _redis_durability(bool(int(info.get("aof_enabled", 0)))),
        _clock(float(server_seconds) + float(server_micros) / 1e6),
    ]


def _redis_version(where: str, text: str) -> Finding:
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if numbers < embedded_redis.MIN_VERSION:
        return Finding(Level.BAD, "redis", f"{where} is {text}", "6.2 is the oldest that will do.")
    return Finding(Level.GOOD, "redis", f"{where}, version {text}")


def _redis_eviction(policy: str) -> Finding:
    if policy == "noeviction":
        return Finding(Level.GOOD, "redis", "maxmemory-policy noeviction")
    remedy = "redis-cli CONFIG SET maxmemory-policy noeviction, and in redis.conf."
    return Finding(
        Level.BAD, "redis", f"maxmemory-policy {policy}: a full Redis drops jobs silently", remedy
    )


def _redis_durability(has_aof: bool) -> Finding:
    if has_aof:
        return Finding(Level.GOOD, "redis", "append-only file on")
    remedy = "redis-cli CONFIG SET appendonly yes, and in redis.conf."
    return Finding(Level.NOTE, "redis", "append-only file off: a crash of Redis loses jobs", remedy)


def _clock(server_time_s: float) -> Finding:
    import time

    skew_s = abs(time.time() - server_time_s)
    if skew_s <= _MAX_CLOCK_SKEW_S:
        return Finding(Level.GOOD, "clock", f"within {skew_s * 1000:.0f} ms of the Redis server's")
    remedy = (
        "Deadlines and leases use the server's clock, so jobs are safe; run NTP for readable times."
    )
    return Finding(Level.NOTE, "clock", f"{skew_s:.1f} s away from the Redis server's", remedy)


# ---------------------------------------------------------------- this host


def _port(settings: Settings) -> list[Finding]:
    if settings.zmq == "none":
        return [Finding(Level.NOTE, "zmq", "off: Redis only")]
    address = urlsplit(settings.zmq)
    if address.scheme != "tcp" or settings.zmq.endswith((":*", ":0")):
        return [Finding(Level.GOOD, "zmq", f"{settings.zmq}")]
    host = "" if address.hostname in (None, "*") else str(address.hostname)
    return [_bind("zmq", settings.zmq, host, address.port or 0)]


def _pages(settings: Settings) -> list[Finding]:
    if settings.http == "none":
        return [Finding(Level.NOTE, "http", "off: no probes and no metrics")]
    host, port = split_address(settings.http)
    return [_bind("http", settings.http, host, port)]


def _bind(what: str, address: str, host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            remedy = "A worker may run there already; take another port, or :0 for a free one."
            return Finding(Level.BAD, what, f"cannot bind {address}: {error}", remedy)
    return Finding(Level.GOOD, what, f"{address} is free" if port else address)


def _disk(settings: Settings) -> list[Finding]:
    findings = []
    for what, path in (("data", settings.data_dir), ("cache", models.cache_dir())):
        place = next(p for p in (path, *path.parents) if p.exists())
        if not os.access(place, os.W_OK):
            remedy = f"Give {place} to this user, or choose another directory."
            findings.append(Finding(Level.BAD, "disk", f"{what} {path}: not writable", remedy))
            continue
        free = shutil.disk_usage(place).free
        text = f"{what} {path}, {free / 2**30:,.0f} GiB free"
        if free < _MIN_FREE_BYTES:
            findings.append(Finding(Level.NOTE, "disk", text, "Make room: 2 GiB is little."))
        else:
            findings.append(Finding(Level.GOOD, "disk", text))
    return findings


def _model(settings: Settings) -> list[Finding]:
    name = settings.model
    if name == FAKE_MODEL:
        return [Finding(Level.NOTE, "model", "fake: no weights, no sense")]
    entry = models.CATALOG.get(name)
    if entry is not None:
        if models.is_cached(entry):
            return [Finding(Level.GOOD, "model", f"{name} is in the cache")]
        remedy = f"`tokenbus model fetch {name}`, or `serve` fetches it at start."
        return [Finding(Level.NOTE, "model", f"{name} is not fetched yet", remedy)]
    if not Path(name).expanduser().exists():
        return [Finding(Level.NOTE, "model", f"{name}: not here; `serve` asks the hub for it")]
    try:
        found = models.resolve(name)
    except CommandError as error:
        return [Finding(Level.BAD, "model", error.message, error.remedy)]
    return [Finding(Level.GOOD, "model", f"{found.name} at {found.path}")]
