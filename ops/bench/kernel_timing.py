"""Timing of kernels: medians over CUDA graph replays, with inputs rotated so that the L2 cache does
not hold them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COPY_TB_S = 4.12
"""Device copy of one H200, bytes read plus written: the bandwidth that floors are computed with."""
MATMUL_TFLOP_S = 790.0
"""bf16 matrix product of 8192^3 on random data on one H200."""
CACHE_BYTES = 160 << 20
"""Rotated inputs cover at least this, several times the L2 cache of an H200 (60 MB)."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: 20th, 50th and 80th percentile over graph replays."""

    p20_us: float
    p50_us: float
    p80_us: float


def num_sets(bytes_per_set: int, limit: int = 48) -> int:
    """How many input sets to rotate through for one that reads so many bytes."""
    if not torch.cuda.is_available():
        return 1
    return max(1, min(limit, -(-CACHE_BYTES // max(bytes_per_set, 1))))


def time_calls(
    calls: Sequence[Callable[[], object]], replays: int = 15, min_calls: int = 12
) -> Timing:
    """Capture the calls in order (repeated up to min_calls) in one graph and time its replays.

    Args:
        calls: launches without host synchronization or allocation, each on its own inputs.
        replays: samples of the percentiles.
        min_calls: launches per replay at least.

    Without a GPU each call runs once in Triton's interpreter, and the time means nothing.
    """
    if not torch.cuda.is_available():
        return _time_once(calls)
    repeated = [*calls] * max(1, -(-min_calls // len(calls)))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in repeated:
                call()
        for _ in range(3):
            graph.replay()
        samples = []
        for _ in range(replays):
            begin, end = _new_event(), _new_event()
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1000.0 / len(repeated))
    samples.sort()
    count = len(samples) - 1
    return Timing(*(samples[round(count * q)] for q in (0.2, 0.5, 0.8)))


def _time_once(calls: Sequence[Callable[[], object]]) -> Timing:
    began = time.perf_counter()
    for call in calls:
        call()
    us = (time.perf_counter() - began) * 1e6 / len(calls)
    return Timing(us, us, us)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. floor_us: bytes over the copy rate or operations over the matmul rate,
    whichever is longer. baseline_us: torch beside it, NaN where there is none. note: what else the
    line says of what was measured."""

    name: str
    timing: Timing
    floor_us: float
    bytes_moved: float
    flops: float
    baseline: str = ""
    baseline_us: float = float("nan")
    note: str = ""

    def as_dict(self) -> dict[str, float | str]:
        """Flat values for JSON."""
        p50 = self.timing.p50_us
        return {
            "name": self.name,
            "p20_us": round(self.timing.p20_us, 2),
            "p50_us": round(p50, 2),
            "p80_us": round(self.timing.p80_us, 2),
            "floor_us": round(self.floor_us, 2),
            "gb_s": round(self.bytes_moved / p50 / 1e3, 1),
            "tflop_s": round(self.flops / p50 / 1e6, 1),
            "baseline": self.baseline,
            "baseline_us": round(self.baseline_us, 2) if self.baseline else -1.0,
            **({"note": self.note} if self.note else {}),
        }


def make_row(
    name: str,
    timing: Timing,
    bytes_moved: float,
    flops: float = 0.0,
    baseline: str = "",
    baseline_us: float = float("nan"),
    note: str = "",
) -> Row:
    """A row with its floor worked out."""
    floor = max(bytes_moved / (COPY_TB_S * 1e6), flops / (MATMUL_TFLOP_S * 1e6))
    return Row(name, timing, floor, bytes_moved, flops, baseline, baseline_us, note)


def format_table(rows: list[Row]) -> str:
    """Aligned text, one line per row."""
    lines = [
        f"{'kernel':<44}{'p20':>8}{'p50 us':>9}{'p80':>8}{'floor':>8}{'GB/s':>8}{'TF/s':>7}  beside"
    ]
    for row in rows:
        d = row.as_dict()
        beside = f"{row.baseline} {row.baseline_us:.1f}" if row.baseline else ""
        lines.append(
            f"{row.name:<44}{d['p20_us']:>8}{d['p50_us']:>9}{d['p80_us']:>8}{d['floor_us']:>8}"
            f"{d['gb_s']:>8}{d['tflop_s']:>7}  {beside}"
        )
    return "\n".join(lines)
