"""The Lua scripts of the Redis door. Each file says in its head what keys and arguments it takes
and what it answers; `common.lua` goes in front of each. Knows hashes and loading, nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files

NAMES = (
    *("submit", "take", "fence", "reject", "finish", "restore"),
    *("renew", "claim", "release", "cancel", "discard", "heartbeat", "leave"),
)


def _read(name: str) -> bytes:
    return files("broker.streams").joinpath("lua").joinpath(f"{name}.lua").read_bytes()


SOURCES: dict[str, bytes] = {name: _read("common") + b"\n" + _read(name) for name in NAMES}
_HASHES = {
    name: hashlib.sha1(source, usedforsecurity=False).hexdigest()
    for name, source in SOURCES.items()
}


def load_commands() -> list[tuple[str | bytes, ...]]:
    """Commands that put every script into the server's cache."""
    return [("SCRIPT", "LOAD", source) for source in SOURCES.values()]


def script(
    name: str, keys: Sequence[str], args: Sequence[str | bytes | int]
) -> tuple[str | bytes | int, ...]:
    """The command that runs a script."""
    return ("EVALSHA", _HASHES[name], len(keys), *keys, *args)
