"""The engine's settings, as frozen values handed down from the outside. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model without weights for bus and chaos tests: a fixed token function and a settable step
    time.

    crash_token: the process kills itself with SIGKILL when a prompt contains this id. hang_token:
    the step loop sleeps for ever when a prompt contains it. nan_token: the row's logits count as
    not finite. is_async: the loop runs one step ahead of it, as with a GPU. chunk_align_tokens,
    replays_by_decode: as in `RunnerInfo`.
    """

    vocab_size: int = 512
    max_model_len: int = 4096
    step_ms: float = 0.0
    num_blocks: int = 4096
    eos_token_id: int = -1  # -1: never ends by itself
    crash_token: int = -1
    hang_token: int = -1
    nan_token: int = -1
    is_async: bool = False
    chunk_align_tokens: int = 1
    replays_by_decode: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs. `model_path` is a directory or a .gguf file, already
    resolved."""

    model_path: str = ""
    model_name: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "packed", "none"] = (
        "auto"  # of a quantized checkpoint on the CPU: 8-bit products where the CPU has them
    )
    load_format: Literal["auto", "dummy"] = "auto"
    max_num_seqs: int = 0  # 0: chosen by device (16 on the CPU, 256 on a GPU)
    max_num_batched_tokens: int = 0  # 0: chosen by device
    max_model_len: int = 0  # 0: the model's own
    block_size_tokens: int = 0  # 0: chosen by device
    kv_cache_bytes: int = 0  # 0: measured from free memory
    gpu_memory_utilization: float = 0.9
    enable_prefix_cache: bool = True
    deterministic: bool = False
    num_threads: int = 0  # CPU threads, at most; 0: all cores
    fake: FakeModel | None = None

    def to_json(self) -> str:
        """One JSON object, read back by `from_json` in the engine process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Inverse of `to_json`. Raises TypeError on an unknown key."""
        data = json.loads(text)
        fake = data.pop("fake", None)
        return cls(**data, fake=FakeModel(**fake) if fake is not None else None)
