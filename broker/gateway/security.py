"""Who may connect: bind addresses, CURVE keys, the allow list, and ZAP.

In clear text the door binds loopback and `ipc://` only. With CURVE, libzmq asks the ZAP handler
about every connection; it answers from the allow list, and denies everything else.
"""

from __future__ import annotations

import ipaddress
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import zmq
from zmq.utils import z85

from broker.config import ZmqConfig

log = structlog.get_logger("broker.gateway")

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
KEY_CHARS = 40


class InsecureBind(ValueError):
    """The configuration would expose the door, or its keys, to strangers; says what to change."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The door's keys (Z85) and the tenant of each client key that may connect ("": any)."""

    public_key: bytes
    secret_key: bytes
    tenants: Mapping[bytes, str]

    def __repr__(self) -> str:
        return f"Curve(public_key={self.public_key!r}, {len(self.tenants)} clients)"


def load_curve(config: ZmqConfig) -> Curve | None:
    """Keys from the configured files, or None for clear text. Raises InsecureBind."""
    if not config.secret_key_file:
        if not config.allow_insecure_bind and not is_local(config.endpoint):
            raise InsecureBind(
                f"{config.endpoint} is not a loopback address: set secret_key_file and allow_file "
                "(CURVE; make keys with `tokenbus keys`), or allow_insecure_bind if another layer "
                "protects it"
            )
        return None
    if not config.allow_file:
        raise InsecureBind("secret_key_file needs allow_file: one client public key a line")
    secret = _read_secret(Path(config.secret_key_file))
    tenants = read_allow_list(Path(config.allow_file))
    return Curve(zmq.curve_public(secret), secret, tenants)


def is_local(endpoint: str) -> bool:
    """Whether only this host can reach the endpoint."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_allow_list(path: Path) -> dict[bytes, str]:
    """Lines of `public-key [tenant] [# comment]`, and whole lines of comment. Raises InsecureBind
    for another line.
    """
    tenants = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue  # no key begins with `#`, but it may hold one: comments stand apart
        key, *rest = words
        comment = [at for at, word in enumerate(rest) if word.startswith("#")]
        tenant = rest[: comment[0]] if comment else rest
        if len(tenant) > 1 or not _is_key(key):
            raise InsecureBind(f"{path}:{number}: expected a Z85 public key and perhaps a tenant")
        tenants[key.encode()] = tenant[0] if tenant else ""
    return tenants


def _read_secret(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InsecureBind(f"{path} has mode {mode:04o}: only its owner may read it (chmod 600)")
    key = path.read_text().strip()
    if not _is_key(key):
        raise InsecureBind(f"{path} does not hold a Z85 key of {KEY_CHARS} characters")
    return key.encode()


def _is_key(text: str) -> bool:
    if len(text) != KEY_CHARS:
        return False
    try:
        z85.decode(text)
    except (ValueError, KeyError, struct.error):  # the last: beyond 32 bits
        return False
    return True


class ZapHandler:
    """Answers libzmq's questions about CURVE clients. Must be bound before the door's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._tenants = curve.tenants
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)

    def fileno(self) -> int:
        """Edge-triggered descriptor; call `answer_all` when it is readable."""
        return int(self._socket.getsockopt(zmq.FD))

    def answer_all(self) -> None:
        """Answer every waiting question."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            question = self._socket.recv_multipart()
            self._socket.send_multipart(self._answer(question))

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._tenants:
            return [version, request_id, b"200", b"OK", key, b""]
        log.warning("client.denied", address=address.decode("ascii", "replace"))
        return [version, request_id, b"400", b"not in the allow list", b"", b""]
