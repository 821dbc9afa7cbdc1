"""Both ends of a step without a copy: inputs are read from host memory, results written there.

Host and device share a few slots of pinned memory, used in turn. Which one is a step's follows from
a count on the device, so a captured step has fixed arguments: step n reads and writes slot
n % SLOTS, and its last kernel raises the count. The host counts along, and fills a slot before it
launches the step.

Legend: SLOTS slots, B rows of a decode step, S results of a step, N rows of a state table, C
columns of the block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.pdl import pdl_begin, pdl_options

DECODE_FIELDS = 6
"""int32 of a decode step's inputs for each row: a changed block table entry (row, column, block),
then the row, its number of computed tokens, and the row again if it samples."""


@triton.jit
def _slot(count_ptr, SLOTS: tl.constexpr):
    """The slot of this step."""
    return (tl.load(count_ptr) % SLOTS).to(tl.int32)


# Sizes of steps are not specialised on: one compilation takes many.
@triton.jit(do_not_specialize=["num_inputs"])
def _fetch_inputs_kernel(
    input_ptr,
    host_ptr,
    count_ptr,
    num_inputs,
    host_stride,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = host_ptr + _slot(count_ptr, SLOTS) * host_stride
    # Volatile: the host wrote it, so no cache of the device may answer.
    values = tl.load(at + i, mask=i < num_inputs, volatile=True)
    tl.store(input_ptr + i, values, mask=i < num_inputs)


def fetch_inputs(inputs: torch.Tensor, host: torch.Tensor, count: torch.Tensor) -> None:
    """inputs = the beginning of this step's slot.

    Args:
        inputs: int32 [n] on the device, n <= N; written.
        host: int32 [SLOTS, N], pinned. count: int64 [1] on the device, steps so far.
    """
    block = 256
    _fetch_inputs_kernel[(triton.cdiv(len(inputs), block),)](
        inputs, host, count, len(inputs), host.stride(0),
        SLOTS=len(host), BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _begin_decode_kernel(
    token_row_ptr,
    position_ptr,
    slot_ptr,
    seq_len_ptr,
    due_row_ptr,
    due_position_ptr,
    host_ptr,
    count_ptr,
    block_table_ptr,
    num_rows,
    host_stride,
    table_stride,
    SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: what it writes in its first part is read in its second."""
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    inside = i < num_rows
    at = host_ptr + _slot(count_ptr, SLOTS) * host_stride + i
    # Volatile: the host wrote it, so no cache of the device may answer. All are on their way at
    # once.
    change_row = tl.load(at, mask=inside, other=-1, volatile=True).to(tl.int64)
    change_col = tl.load(at + num_rows, mask=inside, other=0, volatile=True)
    change_block = tl.load(at + 2 * num_rows, mask=inside, other=0, volatile=True)
    row = tl.load(at + 3 * num_rows, mask=inside, other=-1, volatile=True)
    num_computed = tl.load(at + 4 * num_rows, mask=inside, other=0, volatile=True)
    due_row = tl.load(at + 5 * num_rows, mask=inside, other=-1, volatile=True)
    tl.store(
        block_table_ptr + change_row * table_stride + change_col,
        change_block,
        mask=inside & (change_row >= 0),
    )
    tl.debug_barrier()  # all changes of the table before anybody reads it
    is_live = row >= 0
    num_computed = tl.where(is_live, num_computed, 0)
    block = tl.load(
        block_table_ptr + row.to(tl.int64) * table_stride + num_computed // BLOCK_SIZE,
        mask=is_live,
        other=0,
        cache_modifier=".cg",  # another thread may have written it just now
    )
    slot = block * BLOCK_SIZE + num_computed % BLOCK_SIZE
    tl.store(token_row_ptr + i, tl.where(is_live, row, -1), mask=inside)
    tl.store(position_ptr + i, num_computed, mask=inside)
    tl.store(slot_ptr + i, tl.where(is_live, slot, -1), mask=inside)
    tl.store(seq_len_ptr + i, tl.where(is_live, num_computed + 1, 0), mask=inside)
    tl.store(due_row_ptr + i, due_row, mask=inside)
    tl.store(due_position_ptr + i, num_computed + 1, mask=inside)


def begin_decode(
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    due_rows: torch.Tensor,
    due_positions: torch.Tensor,
    host: torch.Tensor,
    count: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    pdl: bool = False,
) -> None:
    """First kernel of a decode step: its slot in host memory -> what the later kernels read.

    Args:
        token_rows, positions, slots: int32 [B]; written: row of each token (-1 padding), its
            position, and its place block_id * block_size + offset in the paged cache (-1 padding).
        seq_lens: int32 [B]; written: tokens with the new one; 0 for padding.
        due_rows, due_positions: int32 [B]; written: the rows that sample (the others -1), and
            where their tokens will stand.
        host: int32 [SLOTS, at least DECODE_FIELDS * B], pinned. A slot begins with
            [DECODE_FIELDS, B]; rows of -1 in it are padding, of changes too. (row, column) pairs
            of changes are distinct.
        count: int64 [1] on the device, steps so far.
        block_table: int32 [N, C]; the changes are written, and then seen by the slots.
        block_size: tokens per block.
        pdl: let the next kernel start while this one runs. It begins itself when all work before
            it is done, in any case.
    """
    num_rows = len(token_rows)
    block = max(triton.next_power_of_2(num_rows), 32)
    # Only the constant: this launch waits for all work before it.
    wants = pdl_options(token_rows, pdl)["PDL"]
    _begin_decode_kernel[(1,)](
        token_rows, positions, slots, seq_lens, due_rows, due_positions, host, count, block_table,
        num_rows, host.stride(0), block_table.stride(0),
        SLOTS=len(host), BLOCK_SIZE=block_size, BLOCK=block, PDL=wants,
        num_warps=min(block // 32, 8),
    )  # fmt: skip


@triton.jit
def _fence_system(THREADS: tl.constexpr):
    """Each of a program's threads: what it stored before is seen, by the host too, before what it
    stores behind this and behind the next barrier."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;",
        "=r,r,~{memory}",
        [tl.arange(0, THREADS)],  # one element a thread: one fence
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_results"])
def _publish_kernel(
    host_token_ptr,
    host_bad_ptr,
    host_stamp_ptr,
    count_ptr,
    token_ptr,
    bad_ptr,
    num_results,
    host_stride,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: it raises the count that all of its threads read.

    The host reads tokens and flags once it sees the stamp, so the stamp is stored when every thread
    has stored its own and has fenced them off, for the whole system.
    """
    pdl_begin(PDL)
    i = tl.arange(0, BLOCK)
    mask = i < num_results
    count = tl.load(count_ptr)
    slot = (count % SLOTS).to(tl.int32)
    tokens = tl.load(token_ptr + i, mask=mask)
    bad = tl.load(bad_ptr + i, mask=mask)
    tl.store(host_token_ptr + slot * host_stride + i, tokens, mask=mask)
    tl.store(host_bad_ptr + slot * host_stride + i, bad, mask=mask)
    if FENCE:
        _fence_system(THREADS)
    tl.debug_barrier()  # all have fenced off their results, and have read the count
    tl.store(host_stamp_ptr + slot, count)
    tl.store(count_ptr, count + 1)


def publish_results(
    host_tokens: torch.Tensor,
    host_bad: torch.Tensor,
    host_stamps: torch.Tensor,
    count: torch.Tensor,
    tokens: torch.Tensor,
    bad: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Last kernel of a step: its results into its slot in host memory, and the count is raised.

    The host may read the slot once it sees the number of the step in `host_stamps`: the stamp comes
    after the results, and all work before this kernel is done then.

    Args:
        host_tokens: int32 [SLOTS, N], host_bad: int8 [SLOTS, N], pinned; the first S written.
        host_stamps: int64 [SLOTS], pinned; written last: the number of the step.
        count: int64 [1] on the device; raised by 1.
        tokens: int32 [S], bad: int8 [S], S <= N, may be 0.
        pdl: launch while the kernel before still runs.
    """
    num_warps = 4
    _publish_kernel[(1,)](
        host_tokens, host_bad, host_stamps, count, tokens, bad,
        len(tokens), host_tokens.stride(0),
        SLOTS=len(host_tokens), BLOCK=triton.next_power_of_2(host_tokens.shape[1]),
        THREADS=32 * num_warps, FENCE=not tokens.is_cpu,  # the interpreter has no inline assembly
        num_warps=num_warps, **pdl_options(count, pdl),
    )  # fmt: skip
