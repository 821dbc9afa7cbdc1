"""The sections of the settings tree: every tunable with its type, range, default and meaning.

One section for each frozen configuration class of the broker and the engine; a test holds the
defaults equal. The descriptions are what the settings table in the documentation is made of.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the tree. Unknown keys are errors: a mistyped setting must not be ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamsSettings(Section):
    """The Redis door."""

    lease_ms: int = Field(
        default=15_000, ge=1_000, description="a job whose worker is silent is taken over"
    )
    renew_ms: int = Field(default=5_000, ge=100, description="how often a lease is renewed")
    reply_ttl_ms: int = Field(default=3_600_000, ge=1_000, description="how long replies are kept")
    max_attempts: int = Field(
        default=3, ge=1, description="attempts before a job goes to the dead stream"
    )
    queue_limit: int = Field(
        default=100_000,
        ge=1,
        description="queued and running jobs before durable ZeroMQ jobs are refused",
    )
    block_ms: int = Field(default=1_000, ge=1, description="longest wait of one read")
    socket_timeout_ms: int = Field(
        default=3_000, ge=1, description="a silent Redis is lost after this"
    )
    coalesce_ms: int = Field(
        default=25, ge=0, description="tokens of one job wait this long for company"
    )
    coalesce_tokens: int = Field(default=8, ge=1, description="or until there are this many")
    dead_max_len: int = Field(default=10_000, ge=1, description="entries kept in the dead stream")


class GatewaySettings(Section):
    """The ZeroMQ door."""

    max_body_bytes: int = Field(default=1 << 20, ge=1_024, description="largest msgpack body")
    max_frame_bytes: int = Field(
        default=16 << 20, ge=1_024, description="largest frame of any kind"
    )
    heartbeat_ms: int = Field(default=2_000, ge=100, description="ZeroMQ heartbeat interval")
    gone_ms: int = Field(default=30_000, ge=1_000, description="a client silent this long is gone")
    retain_ms: int = Field(
        default=300_000, ge=0, description="jobs stay resumable this long after their end was sent"
    )
    retain_jobs: int = Field(
        default=1_000, ge=0, description="finished jobs kept for RESUME, of all clients"
    )
    log_tokens_per_job: int = Field(
        default=65_536, ge=1, description="tokens of a job kept for RESUME"
    )
    secret_key_file: str = Field(
        default="", description="CURVE secret key; empty: clear text, loopback"
    )
    allow_file: str = Field(default="", description="public keys of the clients that may connect")
    allow_insecure_bind: bool = Field(
        default=False, description="clear text beyond loopback, knowingly"
    )


class LimitsSettings(Section):
    """Admission and fairness."""

    max_queued: int = Field(
        default=10_000, ge=1, description="waiting jobs beyond which ZeroMQ jobs are refused"
    )
    max_queued_per_tenant: int = Field(
        default=0, ge=0, description="the same for one tenant; 0: no limit"
    )
    low_share: float = Field(
        default=0.1, ge=0, le=1, description="share of tokens kept for low priority"
    )
    max_engine_kills: int = Field(
        default=3, ge=1, description="a job that was there when so many engines died is dead"
    )
    default_max_tokens: int = Field(
        default=256, ge=1, description="max_tokens of a job that names none"
    )


class EngineSettings(Section):
    """The engine. 0 and `auto` mean: chosen from the device and the model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of weights and activations"
    )
    quantization: Literal["auto", "packed", "none"] = Field(
        default="auto",
        description="of quantized weights on the CPU: auto multiplies 8-bit numbers if the CPU can,"
        " packed is nearer to the file's numbers and slower, none expands them to float32",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights of the true shapes, for measuring"
    )
    max_num_seqs: int = Field(default=0, ge=0, description="jobs in one batch; 0: by device")
    max_num_batched_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens computed in one step; 0: by device, on a GPU 8,192 and `max_num_seqs`",
    )
    max_model_len: int = Field(
        default=0, ge=0, description="longest prompt plus output; 0: the model's"
    )
    block_size_tokens: int = Field(
        default=0, ge=0, description="tokens in a KV cache block; 0: by device"
    )
    kv_cache_bytes: int = Field(default=0, ge=0, description="size of the KV cache; 0: free memory")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of GPU memory used"
    )
    enable_prefix_cache: bool = Field(default=True, description="reuse KV blocks of equal prefixes")
    deterministic: bool = Field(default=False, description="bit-equal logits whatever the batch")
    num_threads: int = Field(default=0, ge=0, description="CPU threads, at most; 0: all cores")


class FakeSettings(Section):
    """`--model fake`: a model without weights, for trying the bus."""

    vocab_size: int = Field(default=512, ge=2, description="token ids")
    max_model_len: int = Field(default=4_096, ge=2, description="longest prompt plus output")
    step_ms: float = Field(default=0.0, ge=0, description="time of one step")
    num_blocks: int = Field(default=4_096, ge=1, description="KV cache blocks")
    eos_token_id: int = Field(default=-1, ge=-1, description="end-of-sequence id; -1: none")
    crash_token: int = Field(default=-1, ge=-1, description="the engine kills itself on this id")
    hang_token: int = Field(default=-1, ge=-1, description="the engine hangs on this id")
    nan_token: int = Field(default=-1, ge=-1, description="logits are not finite on this id")
    is_async: bool = Field(default=False, description="steps run ahead, as on a GPU")
