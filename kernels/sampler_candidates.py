"""The few tokens that a filter's threshold can be among, gathered before the search for it.

The survey, over parts of the vocabulary, leaves each part's maximum and sum of exponentials. From
the maxima alone follows a bound below every possible threshold: the k-th largest maximum has at
least k tokens at or above it, and the largest maxima hold at least their own probability. Only
tokens at or above the bound are collected. A part that has more than PART_CAPACITY of them marks
its row as overflowed: the search then reads the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.pdl import pdl_begin
from kernels.sampler_filter_math import MIN_TEMPERATURE, load_scaled

PART = 1024
"""Tokens of one part of the vocabulary."""
PART_CAPACITY = 32
"""Candidates that one part can hold."""


@triton.jit
def survey_kernel(
    maxima_ptr,
    sums_ptr,
    logits_ptr,
    row_ptr,
    position_ptr,
    temperature_ptr,
    min_position_ptr,
    stop_ptr,
    vocab_size,
    logits_stride,
    NUM_STOP: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Maximum and sum of exp(x - maximum) of one part of one row's scaled logits."""
    entry = tl.program_id(0)
    part = tl.program_id(1)
    pdl_begin(PDL)
    row = tl.load(row_ptr + entry)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= MIN_TEMPERATURE:
            holds_stops = tl.load(position_ptr + entry) < tl.load(min_position_ptr + row)
            logits_at = logits_ptr + entry.to(tl.int64) * logits_stride
            _, x = load_scaled(
                logits_at, part * TILE, vocab_size, temperature, holds_stops,
                stop_ptr + row * NUM_STOP, NUM_STOP, TILE,
            )  # fmt: skip
            top = tl.max(x, axis=0)
            total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0)
            tl.store(maxima_ptr + entry * PARTS + part, top)
            tl.store(sums_ptr + entry * PARTS + part, total)


@triton.jit
def bound_kernel(
    bound_ptr,
    maxima_ptr,
    sums_ptr,
    row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: a value that no threshold of its filters is below; -inf: none was
    found."""
    entry = tl.program_id(0)
    pdl_begin(PDL)
    row = tl.load(row_ptr + entry)
    if row >= 0:
        NEGATIVE: tl.constexpr = float("-inf")
        bound = tl.full([], NEGATIVE, tl.float32)
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        by_count = (top_k > 0) & (top_k < vocab_size)
        if (temperature >= MIN_TEMPERATURE) & (by_count | (top_p < 1.0)):
            parts = tl.arange(0, BLOCK_PARTS)
            mask = parts < PARTS
            maxima = tl.load(maxima_ptr + entry * PARTS + parts, mask=mask, other=NEGATIVE)
            sums = tl.load(sums_ptr + entry * PARTS + parts, mask=mask, other=0.0)
            top = tl.max(maxima, axis=0)
            weights = tl.exp(maxima - tl.where(top == NEGATIVE, 0.0, top))
            if by_count:
                above = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), axis=1)
                is_low = (above < top_k) & mask
                bound = tl.min(tl.where(is_low, maxima, float("inf")), axis=0)
                bound = tl.where(top_k <= PARTS, bound, NEGATIVE)
            else:
                at_least = maxima[None, :] >= maxima[:, None]
                masses = tl.sum(tl.where(at_least, weights[None, :], 0.0), axis=1)
                # The margin covers the rounding of these sums.
                target = top_p * 1.0001 * tl.sum(sums * weights, axis=0)
                bound = tl.max(tl.where(mask & (masses >= target), maxima, NEGATIVE), axis=0)
        tl.store(bound_ptr + entry, bound)


@triton.jit
def collect_kernel(
    value_ptr,
    id_ptr,
    count_ptr,
    bound_ptr,
    maxima_ptr,
    logits_ptr,
    row_ptr,
    position_ptr,
    temperature_ptr,
    min_position_ptr,
    stop_ptr,
    vocab_size,
    logits_stride,
    NUM_STOP: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Candidates of one part: values and ids in order of id, and their number (too many: no
    bound)."""
    entry = tl.program_id(0)
    part = tl.program_id(1)
    pdl_begin(PDL)
    row = tl.load(row_ptr + entry)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= MIN_TEMPERATURE:
            bound = tl.load(bound_ptr + entry)
            own_top = tl.load(maxima_ptr + entry * PARTS + part)
            count = tl.where(bound == float("-inf"), CAPACITY + 1, 0)
            if (own_top >= bound) & (bound > float("-inf")):
                holds_stops = tl.load(position_ptr + entry) < tl.load(min_position_ptr + row)
                logits_at = logits_ptr + entry.to(tl.int64) * logits_stride
                ids, x = load_scaled(
                    logits_at, part * TILE, vocab_size, temperature, holds_stops,
                    stop_ptr + row * NUM_STOP, NUM_STOP, TILE,
                )  # fmt: skip
                is_candidate = x >= bound
                place = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
                count = tl.sum(is_candidate.to(tl.int32), axis=0)
                to = (entry * PARTS + part) * CAPACITY + place
                fits = is_candidate & (place < CAPACITY)
                tl.store(value_ptr + to, x, mask=fits)
                tl.store(id_ptr + to, ids, mask=fits)
            tl.store(count_ptr + entry * PARTS + part, count)
