"""CURVE key files for the ZeroMQ door: one Z85 key in a file, the secret one for its owner only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ops.exit_codes import CommandError, ExitCode
from tokenbus.dealer import CurveKeys

KEY_CHARS = 40  # 32 bytes in Z85


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


def client_keys(server_key: Path | None, key: Path | None) -> CurveKeys | None:
    """Keys for a client: the worker's .public file and one's own .secret file; None for neither.

    Raises CommandError if only one is given, or a file holds no key.
    """
    if server_key is None and key is None:
        return None
    if server_key is None or key is None:
        raise CommandError(
            ExitCode.USAGE,
            "--server-key and --key go together",
            "Give the worker's .public file and your own .secret file.",
        )
    import zmq

    secret = _read(key)
    return CurveKeys(_read(server_key), zmq.curve_public(secret.encode()).decode(), secret)


def _read(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise CommandError(ExitCode.USAGE, f"cannot read {path}: {error.strerror}") from None
    if len(key) != KEY_CHARS:
        raise CommandError(
            ExitCode.USAGE,
            f"{path} does not hold a Z85 key of {KEY_CHARS} characters",
            "`tokenbus keys NAME` makes a pair.",
        )
    return key
