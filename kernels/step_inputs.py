"""Inputs of one engine step, built on the device from the few numbers the host sends.

The host sends, per step, one packed int32 buffer: changed block table entries and, per scheduled
row, its row number and two lengths. These kernels apply the changes and expand the rest into what
the layers read, so the host never touches a token id and one small copy is all that crosses the
bus.

Legend: R rows of the step, T packed tokens, D changed block table entries, N rows of the state
tables, L columns of the token table, C columns of the block table, BS tokens per KV block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _apply_block_changes_kernel(
    changes, block_table, num_changes, table_stride, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_changes
    row = tl.load(changes + i, mask=inside, other=-1).to(tl.int64)
    col = tl.load(changes + num_changes + i, mask=inside, other=0)
    block = tl.load(changes + 2 * num_changes + i, mask=inside, other=0)
    tl.store(block_table + row * table_stride + col, block, mask=inside & (row >= 0))


def apply_block_changes(changes: torch.Tensor, block_table: torch.Tensor) -> None:
    """block_table[changes[0, i], changes[1, i]] = changes[2, i] for every i whose row is not
    negative.

    Args:
        changes: int32 [3, D] contiguous: rows (-1: padding), columns, block numbers. (row, column)
        pairs are distinct.
        block_table: int32 [N, C], written in place.
    """
    num = changes.shape[1]
    if num == 0:
        return
    _apply_block_changes_kernel[(triton.cdiv(num, 256),)](
        changes, block_table, num, block_table.stride(0), BLOCK=256, num_warps=2
    )


def apply_block_changes_ref(changes: torch.Tensor, block_table: torch.Tensor) -> None:
    """Torch reference of `apply_block_changes`."""
    keep = changes[0] >= 0
    rows, cols, blocks = (c[keep].long() for c in changes)
    block_table[rows, cols] = blocks.int()


@triton.jit
def _build_tokens_kernel(
    rows, num_computed, cu_seqlens, token_table, block_table,
    input_ids, positions, slots, seq_lens,
    token_stride, table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(rows + r).to(tl.int64)
    begin = tl.load(cu_seqlens + r)
    count = tl.load(cu_seqlens + r + 1) - begin
    computed = tl.load(num_computed + r)
    live = row >= 0
    if chunk == 0:
        tl.store(seq_lens + r, tl.where(live, computed + count, 0))
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    pos = computed + i
    ids = tl.load(token_table + row * token_stride + pos, mask=inside & live, other=0)
    block = tl.load(
        block_table + row * table_stride + pos // BLOCK_SIZE, mask=inside & live, other=0
    )
    slot = block.to(tl.int64) * BLOCK_SIZE + pos % BLOCK_SIZE
    out = begin.to(tl.int64) + i
    tl.store(input_ids + out, ids, mask=inside)
    tl.store(positions + out, tl.where(live, pos, 0), mask=inside)
    tl.store(slots + out, tl.where(live, slot, -1), mask=inside)


def build_tokens(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    max_new: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Expand R scheduled rows into T packed tokens.

    For token i of row r, at p = num_computed[r] + i: input_ids = token_table[rows[r], p],
    positions = p and slots = block_table[rows[r], p // block_size] * block_size + p % block_size.
    seq_lens[r] = num_computed[r] + number of its tokens. A row of -1 is padding: id 0, position 0,
    slot -1, length 0.

    Args:
        rows, num_computed: int32 [R]. cu_seqlens: int32 [R + 1], cu_seqlens[R] = T.
        token_table: int32 [N, L]. block_table: int32 [N, C].
        max_new: upper bound of tokens per row; sizes the grid.
        input_ids, positions: int32 [>= T], slots: int64 [>= T], seq_lens: int32 [>= R]; written.
    """
    num_rows = rows.shape[0]
    block = 1 if max_new == 1 else 256
    _build_tokens_kernel[(num_rows, triton.cdiv(max_new, block))](
        rows, num_computed, cu_seqlens, token_table, block_table,
        input_ids, positions, slots, seq_lens,
        token_table.stride(0), block_table.stride(0),
        BLOCK_SIZE=block_size, BLOCK=block, num_warps=1 if block == 1 else 4,
    )  # fmt: skip


def build_tokens_ref(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Torch reference of `build_tokens`: (input_ids [T], positions [T], slots [T], seq_lens
    [R])."""
    ids, positions, slots, lens = [], [], [], []
    for r in range(rows.shape[0]):
        row, count = int(rows[r]), int(cu_seqlens[r + 1] - cu_seqlens[r])
        if row < 0:
            ids.append(torch.zeros(count, dtype=torch.int32))
            positions.append(torch.zeros(count, dtype=torch.int32))
            slots.append(torch.full((count,), -1, dtype=torch.int64))
            lens.append(0)
            continue
        pos = torch.arange(count) + int(num_computed[r])
        ids.append(token_table[row, pos].int())
        positions.append(pos.int())
        slots.append(block_table[row, pos // block_size].long() * block_size + pos % block_size)
        lens.append(int(num_computed[r]) + count)
    return (
        torch.cat(ids),
        torch.cat(positions),
        torch.cat(slots),
        torch.tensor(lens, dtype=torch.int32),
    )


@triton.jit
def _gather_rows_kernel(src, index, out, src_stride, out_stride, width, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + r).to(tl.int64)
    inside = (c < width) & (row >= 0)
    value = tl.load(src + row * src_stride + c, mask=inside, other=0)
    tl.store(out + r.to(tl.int64) * out_stride + c, value, mask=c < width)


def gather_rows(src: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = src[index[r]], or zeros where index[r] < 0.

    Args:
        src: [N, W], any dtype, rows contiguous. index: int32 [R]. out: [R, W] of src's dtype;
        written.
    """
    width = out.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _gather_rows_kernel[(index.shape[0], triton.cdiv(width, block))](
        src, index, out, src.stride(0), out.stride(0), width, BLOCK=block, num_warps=4
    )


def gather_rows_ref(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Torch reference of `gather_rows`."""
    keep = (index >= 0).unsqueeze(1)
    return torch.where(keep, src[index.clamp_min(0).long()], torch.zeros((), dtype=src.dtype))
