"""CURVE key files for the ZeroMQ door: one Z85 key in a file, the secret one for its owner only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ops.exit_codes import CommandError, ExitCode


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The two files of a pair, and its public key (Z85, 40 characters)."""

    public_file: Path
    secret_file: Path
    public_key: str


def generate(directory: Path, name: str) -> KeyPair:
    """Make `<name>.public` (0644) and `<name>.secret` (0600). Never overwrites.

    Raises CommandError if one of the files is there, or libzmq has no CURVE.
    """
    import zmq

    if not zmq.has("curve"):
        raise CommandError(
            ExitCode.FAILED,
            "this libzmq was built without CURVE",
            "pip install pyzmq from a wheel.",
        )
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    pair = KeyPair(directory / f"{name}.public", directory / f"{name}.secret", public)
    _create(pair.secret_file, secret, 0o600)
    _create(pair.public_file, public, 0o644)
    return pair


def _create(path: Path, key: str, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise CommandError(
            ExitCode.FAILED,
            f"{path} exists; a key in use must not be replaced by accident",
            "Choose another name, or remove both files of the pair.",
        ) from None
    with os.fdopen(fd, "w") as file:
        file.write(f"{key}\n")
