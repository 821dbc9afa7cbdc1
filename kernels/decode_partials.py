"""Partial results of decode attention: where they lie, and the second kernels, which join those of
rows with several items: in order of position, or all at once, which takes half the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.decode_fold import fold
from kernels.decode_plan import DecodePlan

MANY_ROWS = 48
"""From here on most rows are one work item."""

JOINED_ITEMS = 16
"""Partial results that a program joins at once: all their loads are in flight together."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of rows with several items; shared by all layers, never read before it is
    written.

    acc float32 [max_slots, HQ, D]; max_sum float32 [max_slots, HQ, 2]: running maximum (base 2)
    and sum.
    """

    acc: torch.Tensor
    max_sum: torch.Tensor


def new_decode_workspace(
    plan: DecodePlan, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> DecodeWorkspace:
    """Allocate the workspace that goes with a plan. Raises ValueError for uneven GQA groups."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads do not share {num_kv_heads} kv heads evenly")
    device = plan.items.device
    return DecodeWorkspace(
        acc=torch.zeros(plan.max_slots, num_q_heads, head_dim, device=device),
        max_sum=torch.zeros(plan.max_slots, num_q_heads, 2, device=device),
    )


@dataclass(frozen=True, slots=True)
class ReduceShape:
    """How the second kernel is cut: heads per program, items in flight, warps."""

    heads: int
    unroll: int
    num_warps: int


def reduce_shape(num_rows: int, num_q_heads: int) -> ReduceShape:
    """Few rows have many items: a program for each head. Of many rows most have one item and
    nothing to fold: few programs, since starting thousands takes longer than they run."""
    if num_rows < MANY_ROWS or num_q_heads < 8:
        return ReduceShape(1, 8, 1)
    return ReduceShape(8, 2, 4)


@triton.jit
def reduce_kernel(
    out_ptr,
    entries_ptr,
    acc_ptr,
    max_sum_ptr,
    out_stride,
    NUM_Q: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold the partial results of some heads of one row as `fold_tiles` would have folded its
    tiles."""
    entry = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if PDL:
        gdc_launch_dependents()
    # As old as the work list: read before the wait (see paged_decode).
    entry_at = entries_ptr + entry * 4
    first_slot = tl.load(entry_at, cache_modifier=".cg").to(tl.int64)
    count = tl.load(entry_at + 1, cache_modifier=".cg")
    lead = tl.load(entry_at + 2, cache_modifier=".cg")
    per_group = tl.load(entry_at + 3, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    if count > 1:
        dims = tl.arange(0, BLOCK_D)
        head_mask = heads < NUM_Q
        mask = head_mask[:, None] & (dims < D)[None, :]
        m = tl.full([HEADS], float("-inf"), tl.float32)
        l = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
        m_group, l_group, acc_group = m, l, acc
        # Unrolled, so that the loads are in flight together. A missing item counts as empty, which
        # the folds leave out exactly.
        for first in range(0, count, UNROLL):
            for offset in tl.static_range(UNROLL):
                item = first + offset
                is_there = item < count
                at = (first_slot + item) * NUM_Q + heads
                here = head_mask & is_there
                m_item = tl.load(max_sum_ptr + at * 2, mask=here, other=float("-inf"))
                l_item = tl.load(max_sum_ptr + at * 2 + 1, mask=here, other=0.0)
                acc_item = tl.load(
                    acc_ptr + at[:, None] * D + dims[None, :], mask=mask & is_there, other=0.0
                )
                m_group, l_group, acc_group = fold(
                    m_group, l_group, acc_group, m_item, l_item, acc_item, 1
                )
                m_next, l_next, acc_next = fold(m, l, acc, m_group, l_group, acc_group, 1)
                is_end = (((lead + item + 1) & (per_group - 1)) == 0) | (item + 1 == count)
                m = tl.where(is_end, m_next, m)
                l = tl.where(is_end, l_next, l)
                acc = tl.where(is_end, acc_next, acc)
                m_group = tl.where(is_end, float("-inf"), m_group)
                l_group = tl.where(is_end, 0.0, l_group)
                acc_group = tl.where(is_end, 0.0, acc_group)
        out = (acc / tl.where(head_mask, l, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        out_at = out_ptr + entry.to(tl.int64) * out_stride + heads[:, None] * D + dims[None, :]
        tl.store(out_at, out, mask=mask)


@triton.jit
def join_kernel(
    out_ptr,
    entries_ptr,
    acc_ptr,
    max_sum_ptr,
    out_stride,
    NUM_Q: tl.constexpr,
    ITEMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the partial results of one head of one row, ITEMS of them at a time."""
    entry = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # As old as the work list: read before the wait (see paged_decode).
    first_slot = tl.load(entries_ptr + entry * 4, cache_modifier=".cg").to(tl.int64)
    count = tl.load(entries_ptr + entry * 4 + 1, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    if count > 1:
        items = tl.arange(0, ITEMS)
        dims = tl.arange(0, BLOCK_D)
        m = float("-inf")
        l = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, count, ITEMS):
            here = first + items < count
            at = (first_slot + first + items) * NUM_Q + head
            mask = here[:, None] & (dims < D)[None, :]
            part = tl.load(acc_ptr + at[:, None] * D + dims[None, :], mask=mask, other=0.0)
            m_items = tl.load(max_sum_ptr + at * 2, mask=here, other=float("-inf"))
            l_items = tl.load(max_sum_ptr + at * 2 + 1, mask=here, other=0.0)
            m_new = tl.maximum(m, tl.max(m_items, axis=0))
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights = tl.exp2(m_items - reference)
            before = tl.exp2(m - reference)
            l = l * before + tl.sum(l_items * weights, axis=0)
            acc = acc * before + tl.sum(part * weights[:, None], axis=0)
            m = m_new
        out_at = out_ptr + entry.to(tl.int64) * out_stride + head * D + dims
        tl.store(out_at, (acc / l).to(out_ptr.dtype.element_ty), mask=dims < D)


def join_partials(
    out: torch.Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    options: dict[str, Any],
) -> None:
    """Write the rows of out [B, HQ, D] that have several items; of a plan in order, and for many
    rows: by the first kernel's own fold."""
    num_rows, num_q_heads, head_dim = out.shape
    shape = reduce_shape(num_rows, num_q_heads)
    args = (out, plan.entries, workspace.acc, workspace.max_sum, out.stride(0))
    sizes = {"NUM_Q": num_q_heads, "D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    if plan.in_order or shape.heads > 1:
        reduce_kernel[num_rows, triton.cdiv(num_q_heads, shape.heads)](
            *args, **sizes, HEADS=shape.heads, UNROLL=shape.unroll, num_warps=shape.num_warps,
            **options,
        )  # fmt: skip
    else:
        join_kernel[num_rows, num_q_heads](
            *args, **sizes, ITEMS=JOINED_ITEMS, num_warps=1, **options
        )
