"""Thresholds of top_k, top_p and min_p, by a search over bit patterns: exact, and without a sort.

Floats are compared through order-preserving integers. Each pass counts tokens and adds up
probability above three pivots, which leaves a quarter of the range; the search ends as soon as
the kept set cannot change. It reads the candidates of kernels/sampler_candidates.py, or the whole
row where those overflowed. Among tokens equal to the threshold the lower ids are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options
from kernels.sampler_candidates import (
    PART,
    PART_CAPACITY,
    bound_kernel,
    collect_kernel,
    survey_kernel,
)
from kernels.sampler_filter_math import MIN_TEMPERATURE, load_scaled, order_key


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """Scratch of the search, for S rows and P parts of the vocabulary.

    maxima, sums float32 [S * P]; counts int32 [S * P]; values float32, ids int32 [S * P *
    PART_CAPACITY]; bounds float32 [S]; threshold_keys, cut_ids int32 [S]: the result.
    """

    maxima: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    bounds: torch.Tensor
    threshold_keys: torch.Tensor
    cut_ids: torch.Tensor


def new_filter_workspace(max_rows: int, vocab_size: int, device: torch.device) -> FilterWorkspace:
    """Allocate scratch for up to max_rows rows."""
    parts = max_rows * triton.cdiv(vocab_size, PART)

    def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return FilterWorkspace(
        maxima=zeros(parts),
        sums=zeros(parts),
        counts=zeros(parts, torch.int32),
        values=zeros(parts * PART_CAPACITY),
        ids=zeros(parts * PART_CAPACITY, torch.int32),
        bounds=zeros(max_rows),
        threshold_keys=zeros(max_rows, torch.int32),
        cut_ids=zeros(max_rows, torch.int32),
    )


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
def _search(
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


@triton.jit
def _threshold_kernel(
    threshold_ptr,
    cut_ptr,
    value_ptr,
    id_ptr,
    count_ptr,
    bound_ptr,
    maxima_ptr,
    sums_ptr,
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
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FAST_TILE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    entry = tl.program_id(0)
    pdl_begin(PDL)
    row = tl.load(row_ptr + entry)
    if row < 0:
        return
    NEGATIVE: tl.constexpr = float("-inf")
    threshold = tl.full([], -2139095041, tl.int32)  # key of -inf
    cut = tl.full([], 2147483647, tl.int32)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    if (temperature >= MIN_TEMPERATURE) & (by_count | by_mass | (min_p > 0.0)):
        parts = tl.arange(0, BLOCK_PARTS)
        part_mask = parts < PARTS
        maxima = tl.load(maxima_ptr + entry * PARTS + parts, mask=part_mask, other=NEGATIVE)
        sums = tl.load(sums_ptr + entry * PARTS + parts, mask=part_mask, other=0.0)
        top = tl.max(maxima, axis=0)
        if (by_count | by_mass) & (top > NEGATIVE):
            counts = tl.load(count_ptr + entry * PARTS + parts, mask=part_mask, other=0)
            mass = tl.sum(sums * tl.exp(maxima - top), axis=0)
            holds_stops = tl.load(position_ptr + entry) < tl.load(min_position_ptr + row)
            logits_at = logits_ptr + entry.to(tl.int64) * logits_stride
            stop_at = stop_ptr + row * NUM_STOP
            first_part = entry.to(tl.int64) * PARTS
            value_at = value_ptr + first_part * CAPACITY
            id_at = id_ptr + first_part * CAPACITY
            if tl.max(counts, axis=0) <= CAPACITY:
                bound = order_key(tl.load(bound_ptr + entry))
                source = (
                    logits_at, stop_at, value_at, id_at, count_ptr + first_part,
                    PARTS * CAPACITY, temperature, holds_stops,
                )  # fmt: skip
                threshold, cut = _search(
                    source, top, bound, mass, top_k, top_p, by_count, by_mass,
                    True, NUM_STOP, CAPACITY, FAST_TILE,
                )  # fmt: skip
            else:
                source = (
                    logits_at, stop_at, value_at, id_at, count_ptr + first_part,
                    vocab_size, temperature, holds_stops,
                )  # fmt: skip
                threshold, cut = _search(
                    source, top, threshold, mass, top_k, top_p, by_count, by_mass,
                    False, NUM_STOP, CAPACITY, TILE,
                )  # fmt: skip
        if min_p > 0.0:
            least = order_key(top + tl.log(min_p))
            if least > threshold:
                threshold = least
                cut = tl.full([], 2147483647, tl.int32)
    tl.store(threshold_ptr + entry, threshold)
    tl.store(cut_ptr + entry, cut)


def find_thresholds(
    workspace: FilterWorkspace,
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
    """Find what the filters keep: tokens with key > threshold, and those with key == threshold
    and id <= cut.

    Args:
        workspace: threshold_keys and cut_ids are the result. Greedy and unfiltered rows keep
            everything.
        logits: [S, V]. rows, positions: int32 [S]. The rest: SamplingTables.
        pdl: launch while the kernel before still runs.
    """
    num_entries, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, PART)
    options = pdl_options(logits, pdl)
    num_stop, w = stop_ids.shape[1], workspace
    survey_kernel[(num_entries, parts)](
        w.maxima, w.sums, logits, rows, positions, temperature, min_position, stop_ids,
        vocab_size, logits.stride(0),
        NUM_STOP=num_stop, PARTS=parts, TILE=PART, num_warps=4, **options,
    )  # fmt: skip
    block_parts = triton.next_power_of_2(parts)
    bound_kernel[(num_entries,)](
        w.bounds, w.maxima, w.sums, rows, temperature, top_k, top_p, vocab_size,
        PARTS=parts, BLOCK_PARTS=block_parts, num_warps=8, **options,
    )  # fmt: skip
    collect_kernel[(num_entries, parts)](
        w.values, w.ids, w.counts, w.bounds, w.maxima,
        logits, rows, positions, temperature, min_position, stop_ids,
        vocab_size, logits.stride(0),
        NUM_STOP=num_stop, PARTS=parts, CAPACITY=PART_CAPACITY, TILE=PART, num_warps=4, **options,
    )  # fmt: skip
    _threshold_kernel[(num_entries,)](
        w.threshold_keys, w.cut_ids, w.values, w.ids, w.counts, w.bounds, w.maxima, w.sums,
        logits, rows, positions, temperature, top_k, top_p, min_p, min_position, stop_ids,
        vocab_size, logits.stride(0),
        NUM_STOP=num_stop, PARTS=parts, BLOCK_PARTS=block_parts, CAPACITY=PART_CAPACITY,
        FAST_TILE=min(4096, block_parts * PART_CAPACITY),
        TILE=min(4096, max(triton.next_power_of_2(vocab_size), 128)),
        num_warps=16, **options,
    )  # fmt: skip
