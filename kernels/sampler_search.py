"""The search of the sampler's filters: the lowest key that top_k or top_p keeps in one row.

Each pass counts tokens and adds up probability above three pivots, which leaves a quarter of the
range of keys; the search ends as soon as the kept set cannot change.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampler_filter_math import load_scaled, order_key


@triton.jit
def _load_tokens(
    source,
    first,
    IS_FAST: tl.constexpr,
    NUM_STOP: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """ids and scaled logits of one tile, of the candidates or of the whole row.

    source: logits_at, stop_at, value_at, id_at, count_at, length, temperature, holds_stops.
    """
    if IS_FAST:
        index = first + tl.arange(0, TILE)
        count = tl.load(source[4] + index // CAPACITY, mask=index < source[5], other=0)
        is_there = index % CAPACITY < count
        ids = tl.load(source[3] + index, mask=is_there, other=2147483647)
        x = tl.load(source[2] + index, mask=is_there, other=float("-inf"))
    else:
        ids, x = load_scaled(
            source[0], first, source[5], source[6], source[7], source[1], NUM_STOP, TILE
        )
    return ids, x


@triton.jit
def _above(
    source,
    top,
    threshold,
    cut,
    pivot_0,
    pivot_1,
    pivot_2,
    IS_FAST: tl.constexpr,
    NUM_STOP: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tokens at or above three ascending pivots, among those that (threshold, cut) keep: counts and
    masses."""
    count_0 = tl.zeros([TILE], tl.int32)
    count_1 = tl.zeros([TILE], tl.int32)
    count_2 = tl.zeros([TILE], tl.int32)
    mass_0 = tl.zeros([TILE], tl.float32)
    mass_1 = tl.zeros([TILE], tl.float32)
    mass_2 = tl.zeros([TILE], tl.float32)
    for first in range(0, source[5], TILE):
        ids, x = _load_tokens(source, first, IS_FAST, NUM_STOP, CAPACITY, TILE)
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
    source,
    threshold,
    cut,
    wanted,
    IS_FAST: tl.constexpr,
    NUM_STOP: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Id of the wanted-th token (from 1) whose key equals the threshold, among ids up to cut."""
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], 2147483647, tl.int32)
    for first in range(0, source[5], TILE):
        ids, x = _load_tokens(source, first, IS_FAST, NUM_STOP, CAPACITY, TILE)
        is_tied = (order_key(x) == threshold) & (ids <= cut) & (x > float("-inf"))
        here = tl.sum(is_tied.to(tl.int32), axis=0)
        if (seen < wanted) & (seen + here >= wanted):
            rank = tl.cumsum(is_tied.to(tl.int32), axis=0)
            found = tl.min(tl.where(is_tied & (rank == wanted - seen), ids, 2147483647), axis=0)
        seen += here
    return found


@triton.jit
def search_threshold(
    source,
    top,
    threshold,
    mass,
    top_k,
    top_p,
    by_count,
    by_mass,
    IS_FAST: tl.constexpr,
    NUM_STOP: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Two searches by one loop: round 0 for top_k, round 1 for top_p over what it left.

    threshold: a key that is low enough. mass: of the whole row, for top_p without top_k.
    """
    cut = tl.full([], 2147483647, tl.int32)
    for search in range(2):
        if tl.where(search == 0, by_count, by_mass):
            # Invariant: the set at or above `low` is large enough, the one at or above `high` is
            # not.
            low = threshold.to(tl.int64)
            high = order_key(top).to(tl.int64) + 1
            high_count = tl.full([], 0, tl.int32)
            high_mass = tl.full([], 0.0, tl.float32)
            low_count, _, _, low_mass, _, _ = _above(
                source, top, threshold, cut, threshold, threshold, threshold,
                IS_FAST, NUM_STOP, CAPACITY, TILE,
            )  # fmt: skip
            total = tl.where(by_count, low_mass, mass)
            target = tl.minimum(tl.maximum(top_p * total, 1e-30), low_mass)
            is_needed = (search == 1) | (low_count > top_k)
            while is_needed & (high - low > 1):
                step = tl.maximum((high - low) // 4, 1)
                pivot_0 = low + step
                pivot_1 = tl.minimum(low + 2 * step, high - 1)
                pivot_2 = tl.minimum(low + 3 * step, high - 1)
                count_0, count_1, count_2, mass_0, mass_1, mass_2 = _above(
                    source, top, threshold, cut,
                    pivot_0.to(tl.int32), pivot_1.to(tl.int32), pivot_2.to(tl.int32),
                    IS_FAST, NUM_STOP, CAPACITY, TILE,
                )  # fmt: skip
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
                # One token between the bounds, or exactly top_k above the lower: nothing to decide.
                is_settled = (low_count - high_count <= 1) | ((search == 0) & (low_count == top_k))
                is_needed = is_settled == 0
            found = low.to(tl.int32)
            tied = low_count - high_count
            if is_needed & (tied > 1):
                # The search went down to one bit pattern, shared by `tied` tokens: how many of
                # them?
                weight = (low_mass - high_mass) / tied
                by_weight = tl.ceil((target - high_mass) / weight).to(tl.int32)
                wanted = tl.where(search == 0, top_k - high_count, by_weight)
                wanted = tl.minimum(tl.maximum(wanted, 1), tied)
                old_cut = tl.where(found == threshold, cut, 2147483647)
                cut = _tie_cut(source, found, old_cut, wanted, IS_FAST, NUM_STOP, CAPACITY, TILE)
                threshold = found
            elif found > threshold:
                threshold = found
                cut = tl.full([], 2147483647, tl.int32)
    return threshold, cut
