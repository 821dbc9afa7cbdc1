"""Per-token inputs of a step, built on the device from one entry per sequence.

A batch entry names a stable row of the device's state tables; negative rows are padding. This
kernel expands entries into what the per-token kernels read: row, position and cache slot of every
token, and each sequence's length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin, pdl_options


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _expand_inputs_kernel(
    token_row_ptr,
    position_ptr,
    slot_ptr,
    seq_len_ptr,
    row_ptr,
    num_computed_ptr,
    cu_seqlens_ptr,
    block_table_ptr,
    table_stride,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    pdl_begin(PDL)
    row = tl.load(row_ptr + entry)
    begin = tl.load(cu_seqlens_ptr + entry)
    end = tl.minimum(tl.load(cu_seqlens_ptr + entry + 1), num_tokens)
    num_computed = tl.load(num_computed_ptr + entry)
    if tl.program_id(1) == 0:
        seq_len = tl.where(row >= 0, num_computed + end - begin, 0)
        tl.store(seq_len_ptr + entry, seq_len)
    # Entries longer than one block are walked with the stride of the second grid dimension.
    for first in range(begin + tl.program_id(1) * BLOCK, end, BLOCK * tl.num_programs(1)):
        tokens = first + tl.arange(0, BLOCK)
        mask = tokens < end
        positions = num_computed + tokens - begin
        is_live = mask & (row >= 0)
        block_ids = tl.load(
            block_table_ptr + row.to(tl.int64) * table_stride + positions // BLOCK_SIZE,
            mask=is_live,
            other=0,
        )
        slots = tl.where(is_live, block_ids * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
        tl.store(token_row_ptr + tokens, tl.where(is_live, row, -1), mask=mask)
        tl.store(position_ptr + tokens, tl.where(is_live, positions, 0), mask=mask)
        tl.store(slot_ptr + tokens, slots, mask=mask)


def expand_inputs(
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    pdl: bool = False,
) -> None:
    """Expand batch entries into tokens.

    Args:
        token_rows, positions, slots: int32 [T]; written: state row (-1 padding), absolute
            position, and slot
            block_id * block_size + offset of each token in the paged cache (-1 padding).
        seq_lens: int32 [R]; written: num_computed plus the new tokens; 0 for padding.
        rows: int32 [R], state row of each entry; negative: padding.
        num_computed: int32 [R], tokens whose KV is in the cache before the step.
        cu_seqlens_q: int32 [R + 1], where each entry's new tokens begin; increasing, last value <=
            T. A decode batch
            is 0, 1, 2, ..., R. Tokens from the last value on are not written.
        block_tables: int32 [max rows, max blocks].
        block_size: tokens per block.
        pdl: launch while the kernel before still runs.
    """
    num_entries = rows.shape[0]
    num_tokens = token_rows.shape[0]
    block = 256 if num_tokens > num_entries else 1
    programs = min(triton.cdiv(num_tokens, block), 16) if block > 1 else 1
    _expand_inputs_kernel[(num_entries, programs)](
        token_rows,
        positions,
        slots,
        seq_lens,
        rows,
        num_computed,
        cu_seqlens_q,
        block_tables,
        block_tables.stride(0),
        num_tokens,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1,
        **pdl_options(token_rows, pdl),
    )


def expand_inputs_ref(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in torch: (token_rows, positions, slots, seq_lens) for the tokens below
    cu_seqlens_q[-1]."""
    counts = cu_seqlens_q.diff()
    entry = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts.long())
    offset = torch.arange(len(entry), device=rows.device) - cu_seqlens_q[entry]
    live = rows[entry] >= 0
    positions = torch.where(live, num_computed[entry] + offset, 0)
    block_ids = block_tables[rows[entry].clamp_min(0).long(), (positions // block_size).long()]
    slots = torch.where(live, block_ids * block_size + positions % block_size, -1)
    seq_lens = torch.where(rows >= 0, num_computed + counts, 0)
    return rows[entry].clamp_min(-1), positions, slots, seq_lens
