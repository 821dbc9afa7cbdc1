"""The end of the sampler: joins the partial results of one row and writes its token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish_row(
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
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_LOGPROB: tl.constexpr,
):
    """Join the partial results of one row and write its token everywhere."""
    splits = tl.arange(0, BLOCK_SPLITS)
    mask = splits < SPLITS
    NEGATIVE: tl.constexpr = float("-inf")
    # Written by other programs during this launch: read past the L1 cache.
    scores = tl.load(partial_at + splits, mask=mask, other=NEGATIVE, cache_modifier=".cg")
    id_bits = tl.load(partial_at + SPLITS + splits, mask=mask, other=0.0, cache_modifier=".cg")
    maxima = tl.load(
        partial_at + 2 * SPLITS + splits, mask=mask, other=NEGATIVE, cache_modifier=".cg"
    )
    sums = tl.load(partial_at + 3 * SPLITS + splits, mask=mask, other=0.0, cache_modifier=".cg")
    ids = id_bits.to(tl.int32, bitcast=True)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(mask & (scores == best), ids, 2147483647), axis=0)
    top = tl.max(maxima, axis=0)
    # A split with a NaN or +inf leaves a NaN sum.
    is_clean = tl.sum(tl.where(sums == sums, 0, 1), axis=0) == 0
    is_bad = (best == NEGATIVE) | (is_clean == 0)
    token = tl.where(is_bad, 0, token)
    tl.store(out_token_ptr + entry, token)
    tl.store(out_bad_ptr + entry, is_bad.to(tl.int8))
    tl.store(token_table_ptr + row.to(tl.int64) * table_stride + position, token)
    if HAS_LOGPROB:
        reference = tl.where(is_bad, 0.0, top)
        total = tl.sum(tl.where(mask, sums * tl.exp(maxima - reference), 0.0), axis=0)
        chosen = tl.load(logits_at + token).to(tl.float32)
        logprob = chosen - reference - tl.log(tl.where(is_bad, 1.0, total))
        tl.store(out_logprob_ptr + entry, tl.where(is_bad, float("nan"), logprob))
