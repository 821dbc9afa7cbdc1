"""Thresholds of top_k, top_p and min_p, by a search over bit patterns: exact, and without a sort.

Floats are compared through order-preserving integers. Each pass over a row counts tokens and adds up probability
above three pivots, which leaves a quarter of the range; the search ends as soon as the kept set cannot change, which
on real logits is after a few passes. Among tokens equal to the threshold the lower ids are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options

MIN_TEMPERATURE = tl.constexpr(1e-5)
"""Temperatures below this count as 0."""


@triton.jit
def order_key(x):
    """int32 that compares as the float32 does; -0 and +0 differ, which only orders a tie."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scaled_logits(raw, ids, temperature, holds_stops, stop_at, NUM_STOP: tl.constexpr):
    """raw / T (raw for greedy rows), -inf for NaN, +inf and for stop ids that min_tokens holds back."""
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
def _load_scaled(
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


@triton.jit
def _above(
    logits_at,
    vocab_size,
    temperature,
    holds_stops,
    stop_at,
    top,
    threshold,
    cut,
    pivot_0,
    pivot_1,
    pivot_2,
    NUM_STOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tokens at or above three ascending pivots, among those that (threshold, cut) keep: counts and masses."""
    count_0 = tl.zeros([TILE], tl.int32)
    count_1 = tl.zeros([TILE], tl.int32)
    count_2 = tl.zeros([TILE], tl.int32)
    mass_0 = tl.zeros([TILE], tl.float32)
    mass_1 = tl.zeros([TILE], tl.float32)
    mass_2 = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        ids, x = _load_scaled(
            logits_at, first, vocab_size, temperature, holds_stops, stop_at, NUM_STOP, TILE
        )
        key = order_key(x)
        is_kept = (key > threshold) | ((key == threshold) & (ids <= cut))
        is_kept = is_kept & (x > float("-inf"))
        weight = tl.where(is_kept, tl.exp(x - top), 0.0)
        count_0 += (is_kept & (key >= pivot_0)).to(tl.int32)
        count_1 += (is_kept & (key >= pivot_1)).to(tl.int32)
        count_2 += (is_kept & (key >= pivot_2)).to(tl.int32)
        mass_0 += tl.where(key >= pivot_0, weight, 0.0)
        mass_1 += tl.where(key >= pivot_1, weight, 0.0)
        mass_2 += tl.where(key >= pivot_2, weight, 0.0)
    return (
        tl.sum(count_0, axis=0),
        tl.sum(count_1, axis=0),
        tl.sum(count_2, axis=0),
        tl.sum(mass_0, axis=0),
        tl.sum(mass_1, axis=0),
        tl.sum(mass_2, axis=0),
    )


@triton.jit
def _tie_cut(
    logits_at,
    vocab_size,
    temperature,
    holds_stops,
    stop_at,
    threshold,
    cut,
    wanted,
    NUM_STOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Id of the wanted-th token (from 1) whose key equals the threshold, among ids up to cut."""
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], 2147483647, tl.int32)
    for first in range(0, vocab_size, TILE):
        ids, x = _load_scaled(
            logits_at, first, vocab_size, temperature, holds_stops, stop_at, NUM_STOP, TILE
        )
        is_tied = (order_key(x) == threshold) & (ids <= cut) & (ids < vocab_size)
        here = tl.sum(is_tied.to(tl.int32), axis=0)
        if (seen < wanted) & (seen + here >= wanted):
            rank = tl.cumsum(is_tied.to(tl.int32), axis=0)
            found = tl.min(tl.where(is_tied & (rank == wanted - seen), ids, 2147483647), axis=0)
        seen += here
    return found


@triton.jit
def _threshold_kernel(
    threshold_ptr,
    cut_ptr,
    logits_ptr,
    row_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    min_position_ptr,
    stop_ptr,
    vocab_size,
    logits_stride,
    NUM_STOP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Two searches by one loop: round 0 for top_k, round 1 for top_p over what it left."""
    entry = tl.program_id(0)
    pdl_begin(PDL)
    LOWEST: tl.constexpr = -2139095041  # key of -inf
    threshold = tl.full([], LOWEST, tl.int32)
    cut = tl.full([], 2147483647, tl.int32)
    row = tl.load(row_ptr + entry)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    if (temperature >= MIN_TEMPERATURE) & (by_count | by_mass | (min_p > 0.0)):
        holds_stops = tl.load(position_ptr + entry) < tl.load(min_position_ptr + row)
        logits_at = logits_ptr + entry.to(tl.int64) * logits_stride
        stop_at = stop_ptr + row * NUM_STOP
        maxima = tl.full([TILE], float("-inf"), tl.float32)
        for first in range(0, vocab_size, TILE):
            ids, x = _load_scaled(
                logits_at, first, vocab_size, temperature, holds_stops, stop_at, NUM_STOP, TILE
            )
            maxima = tl.maximum(maxima, x)
        top = tl.max(maxima, axis=0)
        top_key = order_key(top)
        for search in range(2):
            if (
                tl.where(search == 0, by_count, by_mass)
                & (top > float("-inf"))
                & (top < float("inf"))
            ):
                # Invariant: the set at or above `low` is large enough, the one at or above `high` is not.
                low = threshold.to(tl.int64)
                high = top_key.to(tl.int64) + 1
                high_count = tl.full([], 0, tl.int32)
                high_mass = tl.full([], 0.0, tl.float32)
                low_count, _, _, low_mass, _, _ = _above(
                    logits_at,
                    vocab_size,
                    temperature,
                    holds_stops,
                    stop_at,
                    top,
                    threshold,
                    cut,
                    threshold,
                    threshold,
                    threshold,
                    NUM_STOP,
                    TILE,
                )
                target = tl.maximum(top_p * low_mass, 1e-30)
                is_needed = (search == 1) | (low_count > top_k)
                while is_needed & (high - low > 1):
                    step = tl.maximum((high - low) // 4, 1)
                    pivot_0 = low + step
                    pivot_1 = tl.minimum(low + 2 * step, high - 1)
                    pivot_2 = tl.minimum(low + 3 * step, high - 1)
                    count_0, count_1, count_2, mass_0, mass_1, mass_2 = _above(
                        logits_at,
                        vocab_size,
                        temperature,
                        holds_stops,
                        stop_at,
                        top,
                        threshold,
                        cut,
                        pivot_0.to(tl.int32),
                        pivot_1.to(tl.int32),
                        pivot_2.to(tl.int32),
                        NUM_STOP,
                        TILE,
                    )
                    enough_0 = tl.where(search == 0, count_0 >= top_k, mass_0 >= target)
                    enough_1 = tl.where(search == 0, count_1 >= top_k, mass_1 >= target)
                    enough_2 = tl.where(search == 0, count_2 >= top_k, mass_2 >= target)
                    if enough_0 == 0:
                        high, high_count, high_mass = pivot_0, count_0, mass_0
                    elif enough_1 == 0:
                        low, low_count, low_mass = pivot_0, count_0, mass_0
                        high, high_count, high_mass = pivot_1, count_1, mass_1
                    elif enough_2 == 0:
                        low, low_count, low_mass = pivot_1, count_1, mass_1
                        high, high_count, high_mass = pivot_2, count_2, mass_2
                    else:
                        low, low_count, low_mass = pivot_2, count_2, mass_2
                    # One token between the bounds, or exactly top_k above the lower: nothing left to decide.
                    is_settled = (low_count - high_count <= 1) | (
                        (search == 0) & (low_count == top_k)
                    )
                    is_needed = is_settled == 0
                found = low.to(tl.int32)
                tied = low_count - high_count
                if is_needed & (tied > 1):
                    # The search went down to one bit pattern, shared by `tied` tokens: how many of them?
                    weight = (low_mass - high_mass) / tied
                    by_weight = tl.ceil((target - high_mass) / weight).to(tl.int32)
                    wanted = tl.where(search == 0, top_k - high_count, by_weight)
                    wanted = tl.minimum(tl.maximum(wanted, 1), tied)
                    same_level = found == threshold
                    cut = _tie_cut(
                        logits_at,
                        vocab_size,
                        temperature,
                        holds_stops,
                        stop_at,
                        found,
                        tl.where(same_level, cut, 2147483647),
                        wanted,
                        NUM_STOP,
                        TILE,
                    )
                    threshold = found
                elif found > threshold:
                    threshold = found
                    cut = tl.full([], 2147483647, tl.int32)
        if min_p > 0.0:
            least = order_key(top + tl.log(min_p))
            if least > threshold:
                threshold = least
                cut = tl.full([], 2147483647, tl.int32)
    tl.store(threshold_ptr + entry, threshold)
    tl.store(cut_ptr + entry, cut)


def find_thresholds(
    threshold_keys: torch.Tensor,
    cut_ids: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Find what the filters keep: tokens with key > threshold, and those with key == threshold and id <= cut.

    Args:
        threshold_keys, cut_ids: int32 [>= S]; written. Greedy and unfiltered rows keep everything.
        logits: [S, V]. rows, positions: int32 [S]. The rest: SamplingTables.
        pdl: launch while the kernel before still runs.
    """
    num_entries, vocab_size = logits.shape
    tile = min(4096, max(triton.next_power_of_2(vocab_size), 128))
    _threshold_kernel[(num_entries,)](
        threshold_keys,
        cut_ids,
        logits,
        rows,
        positions,
        temperature,
        top_k,
        top_p,
        min_p,
        min_position,
        stop_ids,
        vocab_size,
        logits.stride(0),
        NUM_STOP=stop_ids.shape[1],
        TILE=tile,
        num_warps=16,
        **pdl_options(logits, pdl),
    )
