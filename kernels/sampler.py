"""The sampler: filters, Gumbel noise, argmax and hand-over to the token table, without a sort or
a host sync.

A token is argmax(logit / T + g) over the tokens that the filters keep, ties to the lower id; g is
the noise of kernels/rng.py for (seed, position, token id), or 0 for greedy rows. The filters'
thresholds are found by a search over the bit patterns of the scaled logits
(kernels/sampler_filter.py), and only for rows that ask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import rng
from kernels.pdl import pdl_options
from kernels.sampler_filter import FilterWorkspace, find_thresholds, new_filter_workspace
from kernels.sampler_filter_math import MIN_TEMPERATURE, order_key, scaled_logits
from kernels.sampler_finish import finish_row
from kernels.sampling_tables import SamplingTables

_GUMBEL_MAX = tl.constexpr(rng.GUMBEL_MAX)


_TILE = 1024


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """Scratch of one sampler call.

    partials float32 [S, 4, splits]; arrivals int32 [S], zero between calls; filters: of the search.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor
    filters: FilterWorkspace


def new_sampler_workspace(max_rows: int, vocab_size: int, device: torch.device) -> SamplerWorkspace:
    """Allocate scratch for up to max_rows sampled rows."""
    max_splits = triton.cdiv(vocab_size, _TILE)
    return SamplerWorkspace(
        partials=torch.zeros(max_rows * 4 * max_splits, device=device),
        arrivals=torch.zeros(max_rows, dtype=torch.int32, device=device),
        filters=new_filter_workspace(max_rows, vocab_size, device),
    )


@triton.jit
def _select_kernel(
    out_token_ptr,
    out_bad_ptr,
    out_logprob_ptr,
    logits_ptr,
    row_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    min_position_ptr,
    stop_ptr,
    threshold_ptr,
    cut_ptr,
    partial_ptr,
    arrivals_ptr,
    token_table_ptr,
    vocab_size,
    logits_stride,
    table_stride,
    HAS_FILTERS: tl.constexpr,
    HAS_LOGPROB: tl.constexpr,
    NUM_STOP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and part of the vocabulary; the last of a row to arrive finishes it."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(row_ptr + entry)
    if row < 0:
        return
    position = tl.load(position_ptr + entry)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seed_ptr + row)
    holds_stops = position < tl.load(min_position_ptr + row)
    is_random = temperature >= MIN_TEMPERATURE
    logits_at = logits_ptr + entry.to(tl.int64) * logits_stride
    NEGATIVE: tl.constexpr = float("-inf")
    best = tl.full([], NEGATIVE, tl.float32)
    best_id = tl.full([], 2147483647, tl.int32)
    top = tl.full([], NEGATIVE, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    poison = tl.full([], 0.0, tl.float32)
    begin = split * SPLIT_LEN
    for first in range(begin, tl.minimum(begin + SPLIT_LEN, vocab_size), TILE):
        ids = first + tl.arange(0, TILE)
        mask = ids < vocab_size
        raw = tl.load(logits_at + ids, mask=mask, other=NEGATIVE).to(tl.float32)
        is_wrong = (raw != raw) | (raw == float("inf"))
        poison += tl.sum(is_wrong.to(tl.float32), axis=0)
        raw = tl.where(is_wrong, NEGATIVE, raw)
        if HAS_LOGPROB:
            top_new = tl.maximum(top, tl.max(raw, axis=0))
            reference = tl.where(top_new == NEGATIVE, 0.0, top_new)
            total = total * tl.exp(top - reference) + tl.sum(tl.exp(raw - reference), axis=0)
            top = top_new
        scores = scaled_logits(
            raw, ids, temperature, holds_stops, stop_ptr + row * NUM_STOP, NUM_STOP
        )
        if HAS_FILTERS:
            key = order_key(scores)
            threshold = tl.load(threshold_ptr + entry)
            is_kept = (key > threshold) | ((key == threshold) & (ids <= tl.load(cut_ptr + entry)))
            scores = tl.where(is_kept, scores, NEGATIVE)
        # Noise cannot lift a tile whose best logit is too far below the best score so far.
        if is_random & (tl.max(scores, axis=0) + _GUMBEL_MAX > best):
            scores += rng.gumbel(seed, position, ids)
        tile_best, tile_id = tl.max(
            scores, axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        if tile_best > best:
            best = tile_best
            best_id = first + tile_id
    poisoned_total = tl.where(poison > 0.0, float("nan"), total)
    partial_at = partial_ptr + entry.to(tl.int64) * (4 * SPLITS)
    tl.store(partial_at + split, best)
    tl.store(partial_at + SPLITS + split, best_id.to(tl.float32, bitcast=True))
    tl.store(partial_at + 2 * SPLITS + split, top)
    tl.store(partial_at + 3 * SPLITS + split, poisoned_total)
    tl.debug_barrier()  # all stores of this program before its arrival
    arrived = tl.atomic_add(arrivals_ptr + entry, 1, sem="acq_rel") + 1
    if arrived == SPLITS:
        tl.store(arrivals_ptr + entry, 0)
        finish_row(
            entry,
            row,
            position,
            partial_at,
            out_token_ptr,
            out_bad_ptr,
            out_logprob_ptr,
            logits_at,
            token_table_ptr,
            table_stride,
            SPLITS,
            BLOCK_SPLITS,
            HAS_LOGPROB,
        )


def sample(
    out_tokens: torch.Tensor,
    out_bad: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingTables,
    token_table: torch.Tensor,
    workspace: SamplerWorkspace,
    has_filters: bool,
    out_logprobs: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Sample one token per entry and write it to out_tokens and to token_table[rows[s],
    positions[s]].

    Entries with a negative row are padding: nothing is written for them.

    Args:
        out_tokens: int32 [S]; written. 0 where out_bad.
        out_bad: int8 [S]; written: 1 where the row's logits hold a NaN or +inf, or nothing finite
            is left.
        logits: [S, V], any float type, last dimension contiguous.
        rows: int32 [S], stable rows, or -1.
        positions: int32 [S], position of the token to be sampled; below token_table's width.
        params: tables indexed by row.
        token_table: int32 [rows, max_len]; written.
        workspace: for at least S rows and this vocabulary.
        has_filters: False skips the search; then no row's top_k, top_p or min_p is applied.
        out_logprobs: float32 [S] or None; written: log-softmax of the raw logits at the token.
        pdl: launch while the kernel before still runs.
    """
    num_entries, vocab_size = logits.shape
    split_len = _TILE if num_entries <= 8 else 8 * _TILE
    splits = triton.cdiv(vocab_size, split_len)
    options = pdl_options(logits, pdl)
    if has_filters:
        find_thresholds(
            workspace.filters,
            logits,
            rows,
            positions,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.min_position,
            params.stop_ids,
            pdl,
        )
    _select_kernel[(num_entries, splits)](
        out_tokens,
        out_bad,
        out_logprobs if out_logprobs is not None else workspace.partials,
        logits,
        rows,
        positions,
        params.temperature,
        params.seed,
        params.min_position,
        params.stop_ids,
        workspace.filters.threshold_keys,
        workspace.filters.cut_ids,
        workspace.partials,
        workspace.arrivals,
        token_table,
        vocab_size,
        logits.stride(0),
        token_table.stride(0),
        HAS_FILTERS=has_filters,
        HAS_LOGPROB=out_logprobs is not None,
        NUM_STOP=params.stop_ids.shape[1],
        SPLITS=splits,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        SPLIT_LEN=split_len,
        TILE=_TILE,
        num_warps=4,
        **options,
    )


def sample_ref(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, with sorts: (tokens int32 [S], log-probabilities float32 [S]); padding
    gives -1."""
    tokens, logprobs = [], []
    ids = torch.arange(logits.shape[1], device=logits.device)
    for entry, row in enumerate(rows.tolist()):
        if row < 0:
            tokens.append(-1)
            logprobs.append(0.0)
            continue
        raw = logits[entry].float()
        temperature = params.temperature[row]
        is_random = float(temperature) >= MIN_TEMPERATURE.value
        x = raw / temperature if is_random else raw.clone()
        if int(positions[entry]) < int(params.min_position[row]):
            stops = params.stop_ids[row]
            x[stops[stops >= 0].long()] = float("-inf")
        if is_random:
            x = _filtered_ref(
                x, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
            )
            x = x + rng.gumbel_torch_ref(params.seed[row], positions[entry], ids)
        token = int((x == x.max()).nonzero()[0])
        tokens.append(token)
        logprobs.append(float(raw.double().log_softmax(-1)[token]))
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )


def _filtered_ref(x: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """x with -inf where top_k, then top_p, then min_p drop a token; ties are kept from the lower id
    up."""
    order = torch.sort(x, descending=True, stable=True).indices
    is_kept = torch.ones_like(order, dtype=torch.bool)
    if top_k > 0:
        is_kept[top_k:] = False
    weights = (x[order].double() - x.max().double()).exp() * is_kept
    if top_p < 1.0:
        before = weights.cumsum(0) - weights
        is_kept &= before < max(top_p * float(weights.sum()), 1e-30)
    if min_p > 0.0:
        is_kept &= weights >= min_p
    dropped = order[~is_kept]
    x = x.clone()
    x[dropped] = float("-inf")
    return x
