"""Keeping the device's tables in step with the host: changed block table entries, gathered rows.

The host sends only what changed; these kernels apply it, and fetch the rows that a step uses.

Legend: R entries of the step, D changed block table entries, N rows of a state table, C columns of
the block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_changes"])
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
