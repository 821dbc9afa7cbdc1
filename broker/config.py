"""The broker's settings, as frozen values handed down from the outside."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The Redis door. Times in milliseconds."""

    url: str
    lease_ms: int = 15_000
    renew_ms: int = 5_000
    reply_ttl_ms: int = 3_600_000
    max_attempts: int = 3
    queue_limit: int = 100_000  # entries in the job streams before submit answers busy
    block_ms: int = 1_000
    socket_timeout_ms: int = 3_000
    coalesce_ms: int = 25
    coalesce_tokens: int = 8
    dead_max_len: int = 10_000


@dataclass(frozen=True, slots=True)
class ZmqConfig:
    """The ZeroMQ door. `endpoint` may end in :0 or :* for a free port."""

    endpoint: str
    max_body_bytes: int = 1 << 20
    max_frame_bytes: int = 16 << 20
    heartbeat_ms: int = 2_000
    gone_ms: int = 30_000  # a client silent for this long is gone; its jobs are cancelled
    retain_ms: int = 300_000  # finished jobs stay resumable
    retain_jobs: int = 1_000
    log_tokens_per_job: int = 65_536
    secret_key_file: str = ""  # CURVE; empty: clear text, loopback only
    allow_file: str = ""  # public keys that may connect
    allow_insecure_bind: bool = False


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Admission and fairness."""

    max_queued: int = 10_000
    max_queued_per_tenant: int = 0  # 0: no limit
    low_share: float = 0.1  # of the tokens, kept for low priority when it waits
    default_max_tokens: int = 256
    # a job in the engine when it died so often, without progress, is poison
    max_engine_kills: int = 3


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Everything the broker process needs. Paths are resolved; `worker` is unique
    (host-pid-random)."""

    worker: str
    queue: str
    model_path: str
    model_name: str
    link_path: str  # unix socket where the engine connects and gets its rings
    ring_bytes: int = 16 << 20
    drain_ms: int = 30_000
    redis: RedisConfig | None = None
    zmq: ZmqConfig | None = None
    limits: QueueConfig = field(default_factory=QueueConfig)
    engine_hang_ms: int = 60_000  # an engine that says nothing for so long is killed
    fake_vocab_size: int = 0  # > 0: the fake model; text is one letter per token id
    http: str = "127.0.0.1:0"  # probes and metrics; port 0: a free one; empty: none

    def to_json(self) -> str:
        """One JSON object, read back by `from_json` in the broker process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BrokerConfig:
        """Inverse of `to_json`. Raises TypeError on an unknown key."""
        data = json.loads(text)
        redis, zmq, limits = data.pop("redis"), data.pop("zmq"), data.pop("limits")
        return cls(
            **data,
            redis=RedisConfig(**redis) if redis else None,
            zmq=ZmqConfig(**zmq) if zmq else None,
            limits=QueueConfig(**limits),
        )
