"""Where `tokenbus top` looks: every worker of a queue through Redis, or one worker over ZeroMQ."""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

import zmq
from redis import Redis, RedisError

from broker.streams.admin import WorkerLine, queue_status
from ops.settings import public_url
from ops.top_sample import Sample, WorkerSample
from tokenbus.bodies import Hello, error_from_body
from tokenbus.dealer import CurveKeys
from tokenbus.errors import BusUnavailable, NoSession
from tokenbus.protocol import Message, MessageType, decode, encode

ANSWER_S = 3.0
TELLS_NOT = {"ready", "clients", "streams", "events_sent", "messages_sent"}


class Source(Protocol):
    """Something that can be looked at again and again."""

    def look(self) -> Sample:
        """One sample. Raises BusUnavailable."""
        ...

    def close(self) -> None:
        """Free the connection."""
        ...


class RedisSource:
    """The workers hash, the jobs streams and the dead stream of a queue."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue
        self._redis = Redis.from_url(url, socket_timeout=ANSWER_S)

    def look(self) -> Sample:
        """One sample. Raises BusUnavailable."""
        where = public_url(self._url)
        try:
            status = queue_status(self._redis, self._queue)
        except RedisError as error:
            raise BusUnavailable(f"{where}: {error}") from error
        workers = [
            WorkerSample(line.worker, line.model, _state(line), line.vitals)
            for line in status.workers
        ]
        return Sample(self._queue, where, workers, dict(status.queued), status.dead)

    def close(self) -> None:
        """Free the connection."""
        self._redis.close()


class ZmqSource:
    """STATS of one worker. Begins a session of its own, which gets no tokens."""

    def __init__(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        self._endpoint = endpoint
        self._client = f"top-{secrets.token_hex(8)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public_key.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key.encode())
        self._socket.connect(endpoint)
        self._worker = self._model = self._queue = ""

    def look(self) -> Sample:
        """One sample. Raises BusUnavailable."""
        if not self._worker:
            self._greet()
        try:
            body = self._ask(MessageType.STATS, {}, MessageType.STATS)
        except NoSession:  # another worker has the address now
            self._greet()
            body = self._ask(MessageType.STATS, {}, MessageType.STATS)
        state = "ready" if body.get("ready") else "not ready"
        vitals = {
            name: float(value)
            for name, value in body.items()
            if name not in TELLS_NOT and isinstance(value, int | float)
        }
        worker = WorkerSample(self._worker, self._model, state, vitals)
        return Sample(self._queue, self._endpoint, [worker])

    def close(self) -> None:
        """Free the connection."""
        self._context.destroy(linger=0)

    def _greet(self) -> None:
        hello = Hello(client=self._client, credit=0, agent="tokenbus-top")
        body = self._ask(MessageType.HELLO, hello.to_body(), MessageType.WELCOME)
        self._worker, self._queue = str(body["worker"]), str(body["queue"])
        self._model = ", ".join(map(str, body["models"]))

    def _ask(self, kind: MessageType, body: dict[str, Any], answer: MessageType) -> dict[str, Any]:
        """Send and wait for the answer; what else comes is passed over, PINGs are answered."""
        deadline_s = time.monotonic() + ANSWER_S
        self._send(kind, body)
        while (message := self._receive(deadline_s)).type is not answer:
            if message.type is MessageType.PING:
                self._send(MessageType.PONG, {"t": message.body["t"]})
            elif message.type is MessageType.ERROR:
                raise error_from_body(message.body)
        return dict(message.body)

    def _send(self, kind: MessageType, body: dict[str, Any]) -> None:
        try:
            self._socket.send_multipart(encode(kind, body), zmq.NOBLOCK)
        except zmq.Again:
            raise BusUnavailable(f"{self._endpoint} takes no messages") from None

    def _receive(self, deadline_s: float) -> Message:
        left_ms = int(1000 * (deadline_s - time.monotonic()))
        if left_ms <= 0 or not self._socket.poll(left_ms):
            raise BusUnavailable(f"no worker answers at {self._endpoint}")
        return decode(self._socket.recv_multipart())


def _state(line: WorkerLine) -> str:
    if not line.is_alive:
        return "gone"
    if line.is_draining:
        return "draining"
    return "ready" if line.is_ready else "not ready"
