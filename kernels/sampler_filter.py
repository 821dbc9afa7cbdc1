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
from kernels.sampler_filter_math import MIN_TEMPERATURE, order_key
from kernels.sampler_search import search_threshold


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
                threshold, cut = search_threshold(
                    source, top, bound, mass, top_k, top_p, by_count, by_mass,
                    True, NUM_STOP, CAPACITY, FAST_TILE,
                )  # fmt: skip
            else:
                source = (
                    logits_at, stop_at, value_at, id_at, count_ptr + first_part,
                    vocab_size, temperature, holds_stops,
                )  # fmt: skip
                threshold, cut = search_threshold(
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
