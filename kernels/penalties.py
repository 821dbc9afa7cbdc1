"""Repetition, presence and frequency penalty: logits changed by the tokens that a row has.

Where a token is in prompt or output, x = x / r if x > 0, else x * r. Then x -= f * (its number in
the output), and x -= p where the output has it. Each step is rounded to float32, on every device.

What a row has is kept as one number a token, written when the row gets a new run and counted up
when a token is sampled for it, so a step reads numbers in order and no sequence. All launchers pass
over rows whose penalties are neutral; their numbers mean nothing.

Legend: S entries of the step, N rows of the tables, V tokens of the vocabulary, R rows with a new
run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 2048
_TOKENS = 1024

# Kernels are not specialised on numbers and addresses that change from step to step: a compilation
# would hold up a step for half a second.


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """Penalties and tokens of each stable row, on the device.

    repetition, presence, frequency float32 [N]; 1, 0 and 0 are neutral. counts int32 [N, V]: twice
    the number of times that a token is in the output, plus 1 if it is in the prompt.
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    counts: torch.Tensor


def new_penalty_tables(num_rows: int, vocab_size: int, device: torch.device) -> PenaltyTables:
    """Allocate tables in which no row has a penalty."""
    return PenaltyTables(
        repetition=torch.ones(num_rows, device=device),
        presence=torch.zeros(num_rows, device=device),
        frequency=torch.zeros(num_rows, device=device),
        counts=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
    )


def penalty_table_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes that `new_penalty_tables` allocates."""
    return num_rows * (vocab_size + 3) * 4


@triton.jit
def _clear_kernel(counts_ptr, run_ptr, vocab_size, counts_stride, TILE: tl.constexpr):
    row = tl.load(run_ptr + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    zeros = tl.zeros([TILE], tl.int32)
    tl.store(counts_ptr + row * counts_stride + ids, zeros, mask=(ids < vocab_size) & (row >= 0))


@triton.jit(do_not_specialize=["num_runs"])
def _count_kernel(
    counts_ptr,
    run_ptr,
    token_table_ptr,
    num_runs,
    counts_stride,
    table_stride,
    TOKENS: tl.constexpr,
):
    run_at = run_ptr + tl.program_id(0)
    row = tl.load(run_at).to(tl.int64)
    positions = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_prompt = positions < tl.load(run_at + num_runs)
    is_there = (positions < tl.load(run_at + 2 * num_runs)) & (row >= 0)
    ids = tl.load(token_table_ptr + row * table_stride + positions, mask=is_there, other=0)
    at = counts_ptr + row * counts_stride + ids
    # A token may come many times: in any order the same sum.
    tl.atomic_or(at, 1, mask=is_there & is_prompt, sem="relaxed")
    tl.atomic_add(at, 2, mask=is_there & (is_prompt == 0), sem="relaxed")


def count_new_rows(
    tables: PenaltyTables, token_table: torch.Tensor, runs: torch.Tensor, max_length: int
) -> None:
    """Count the tokens of rows that got a new run; what was counted there before is forgotten.

    Args:
        tables: counts of these rows; written.
        token_table: int32 [N, max_len], holds the rows' tokens.
        runs: int32 [3, R] contiguous: distinct rows (-1: padding), tokens of the prompt, tokens of
        prompt and output together.
        max_length: at least the longest of these; on the host.
    """
    num_runs, vocab_size, stride = runs.shape[1], tables.counts.shape[1], tables.counts.stride(0)
    _clear_kernel[(num_runs, triton.cdiv(vocab_size, _TILE))](
        tables.counts, runs, vocab_size, stride, TILE=_TILE, num_warps=4
    )
    _count_kernel[(num_runs, triton.cdiv(max_length, _TOKENS))](
        tables.counts, runs, token_table, num_runs,
        stride, token_table.stride(0), TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


def count_new_rows_ref(
    tables: PenaltyTables, token_table: torch.Tensor, runs: torch.Tensor
) -> None:
    """Torch reference of `count_new_rows`."""
    vocab_size = tables.counts.shape[1]
    for row, num_prompt, length in runs.T.tolist():
        if row >= 0:
            ids = token_table[row, :length].long()
            in_prompt = torch.bincount(ids[:num_prompt], minlength=vocab_size) > 0
            in_output = torch.bincount(ids[num_prompt:], minlength=vocab_size)
            tables.counts[row] = (2 * in_output + in_prompt).int()


@triton.jit
def _is_neutral(repetition, presence, frequency):
    return (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _penalise_kernel(
    logits_ptr,
    row_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    vocab_size,
    logits_stride,
    counts_stride,
    TILE: tl.constexpr,
):
    """One program per entry and part of the vocabulary."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry).to(tl.int64)
    if row < 0:
        return
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if _is_neutral(repetition, presence, frequency):
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    state = tl.load(counts_ptr + row * counts_stride + ids, mask=ids < vocab_size, other=0)
    is_seen = state != 0
    # Most of the vocabulary is in no row: its logits are not touched.
    if tl.max(state, axis=0) > 0:
        at = logits_ptr + entry * logits_stride + ids
        x = tl.load(at, mask=is_seen, other=0.0).to(tl.float32)
        x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        count = state >> 1
        x -= frequency * count.to(tl.float32)
        x -= presence * (count > 0).to(tl.float32)
        tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=is_seen)


def penalise(logits: torch.Tensor, rows: torch.Tensor, tables: PenaltyTables) -> None:
    """Apply the penalties of rows[s] to logits[s], in place.

    Args:
        logits: [S, V], any float type, last dimension contiguous; written.
        rows: int32 [S], stable rows, or -1: nothing is done.
        tables: of these rows and this vocabulary.
    """
    num_entries, vocab_size = logits.shape
    _penalise_kernel[(num_entries, triton.cdiv(vocab_size, _TILE))](
        logits, rows, tables.repetition, tables.presence, tables.frequency, tables.counts,
        vocab_size, logits.stride(0), tables.counts.stride(0),
        TILE=_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def penalise_ref(logits: torch.Tensor, rows: torch.Tensor, tables: PenaltyTables) -> torch.Tensor:
    """Torch reference of `penalise`: the new logits."""
    out = logits.clone()
    for entry, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        state = tables.counts[row]
        x = logits[entry].float()
        repeated = torch.where(x > 0, x / tables.repetition[row], x * tables.repetition[row])
        x = torch.where(state != 0, repeated, x)
        x = x - tables.frequency[row] * (state >> 1)
        x = x - tables.presence[row] * (state > 1)
        out[entry] = x.to(out.dtype)
    return out


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["row_ptr"])
def _count_sampled_kernel(
    token_ptr,
    row_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    num_entries,
    counts_stride,
    ENTRIES: tl.constexpr,
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(row_ptr + entry, mask=entry < num_entries, other=-1).to(tl.int64)
    is_row = row >= 0
    repetition = tl.load(repetition_ptr + row, mask=is_row, other=1.0)
    presence = tl.load(presence_ptr + row, mask=is_row, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=is_row, other=0.0)
    counted = is_row & (_is_neutral(repetition, presence, frequency) == 0)
    token = tl.load(token_ptr + entry, mask=counted, other=0)
    at = counts_ptr + row * counts_stride + token
    tl.store(at, tl.load(at, mask=counted, other=0) + 2, mask=counted)


def count_sampled(tables: PenaltyTables, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Count the tokens that a step sampled: the next step's penalties know them.

    Args:
        tables: counts of these rows; written.
        tokens: int32 [S], of the entries whose row is not negative. rows: int32 [S], distinct, or
        -1: nothing is done.
    """
    num = len(rows)
    _count_sampled_kernel[(triton.cdiv(num, 128),)](
        tokens, rows, tables.repetition, tables.presence, tables.frequency, tables.counts,
        num, tables.counts.stride(0), ENTRIES=128, num_warps=4,
    )  # fmt: skip
