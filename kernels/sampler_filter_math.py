"""What the sampler's kernels share: scaled logits and floats that compare as integers."""

from __future__ import annotations

import triton
import triton.language as tl

MIN_TEMPERATURE = tl.constexpr(1e-5)
"""Temperatures below this count as 0."""


@triton.jit
def order_key(x):
    """int32 that compares as the float32 does; -0 and +0 differ, which only orders a tie."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scaled_logits(raw, ids, temperature, holds_stops, stop_at, NUM_STOP: tl.constexpr):
    """raw / T (raw for greedy rows), -inf for NaN, +inf and for stop ids that min_tokens holds
    back."""
    divisor = tl.where(temperature < MIN_TEMPERATURE, 1.0, temperature)
    is_right = (raw == raw) & (raw < float("inf"))
    raw = tl.where(is_right, raw, float("-inf"))
    x = tl.div_rn(raw, tl.zeros_like(raw) + divisor)
    x += 0.0  # -0 becomes +0: equal logits have equal keys
    if holds_stops:
        for index in tl.static_range(NUM_STOP):
            x = tl.where(ids == tl.load(stop_at + index), float("-inf"), x)
    return x


@triton.jit
def load_scaled(
    logits_at,
    first,
    vocab_size,
    temperature,
    holds_stops,
    stop_at,
    NUM_STOP: tl.constexpr,
    TILE: tl.constexpr,
):
    ids = first + tl.arange(0, TILE)
    raw = tl.load(logits_at + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return ids, scaled_logits(raw, ids, temperature, holds_stops, stop_at, NUM_STOP)
