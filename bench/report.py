"""Result lines: one JSON object a line, with the target and the floor of its name beside the value.

The newest line of a name counts. Targets and floors are those of docs/PERFORMANCE.md.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ops.bench.engine import versions

BATCHES = (1, 8, 64, 256)
_DECODE_TARGETS = {
    "qwen3-8b": (250, 1_750, 8_800, 14_000),
    "qwen3-0.6b": (1_400, 8_000, 20_000, 26_500),
    "smollm2-135m": (2_000, 12_000, 45_000, 85_000),
}
TARGETS: dict[str, float] = {
    f"{model}.decode_tok_s.b{batch}": float(target)
    for model, targets in _DECODE_TARGETS.items()
    for batch, target in zip(BATCHES, targets, strict=True)
} | {
    "qwen3-8b.run_256x1024x1024_s": 26.0,
    "qwen3-8b.ttft_ms.b1": 26.0,
    "qwen3-0.6b.ttft_ms.b1": 5.0,
    "qwen3-8b.prefill_tok_s.b64": 46_000.0,
    "qwen3-8b.ready_s": 6.0,
    "load_gb_s": 30.0,
    "attn_decode_us.32x8.b32.kv4096": 133.0,
    "attn_decode_us.32x4.b1.kv1024": 6.0,
    "deterministic_cost_pct": 15.0,
    "host_us_per_step.b256": 150.0,
    "gpu_active_pct.b256": 99.0,
    "device_allocations_per_step": 0.0,
    "ring.rtt_us.p50": 10.0,
    "bus.jobs_s.redis": 3_000.0,
    "bus.token_events_s.zmq": 300_000.0,
    "bus.submit_to_engine_us.p50": 250.0,
    "bus.token_to_client_us.p50": 200.0,
    "cpu.smollm2.b1.vs_llama_cpp": 0.5,
    "cpu.smollm2.b8.vs_transformers": 3.0,
    "cpu.smollm2.b8.vs_llama_cpp": 1.0,
}
FLOORS: dict[str, float] = {
    "qwen3-8b.run_256x1024x1024_s": 24.7,
    "qwen3-8b.ttft_ms.b1": 21.0,
    "qwen3-8b.prefill_tok_s.b64": 48_000.0,
    "load_gb_s": 55.0,
    "attn_decode_us.32x8.b32.kv4096": 130.0,
}


def _command() -> str:
    """How this process was started; of absolute paths, which mean nothing elsewhere, the names."""
    args = (Path(arg).name if arg.startswith("/") else arg for arg in sys.orig_argv[1:])
    return shlex.join(["python", *args])


def machine() -> str:
    """The GPU, or the processor where there is none."""
    name = versions()["machine"]
    return name if name != "cpu" else f"{platform.machine()} CPU"


class ResultFile:
    """Appends result lines to a file, and prints them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(
        self, what: str, value: float, unit: str, floor: float | None = None, **details: Any
    ) -> None:
        """One result; details are further fields of the line."""
        line = {
            "what": what,
            "value": round(value, 4),
            "unit": unit,
            "target": TARGETS.get(what),
            "floor": FLOORS.get(what) if floor is None else floor,
            "command": _command(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            **details,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{what} {line['value']} {unit} (target {line['target']})", flush=True)

    def latest(self) -> dict[str, float]:
        """The newest value of each name."""
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text().splitlines())
        return {line["what"]: line["value"] for line in lines}
