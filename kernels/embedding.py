"""Token embeddings, gathered through the device's token table: the host never sees the ids it feeds
back. The norm behind them may be shared with the product behind it: see deferred_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.deferred_norm import NextNorm, ScaledInput
from kernels.pdl import pdl_begin_late, pdl_options


@triton.jit
def _embed_kernel(
    out_ptr,
    weight_ptr,
    token_table_ptr,
    row_ptr,
    position_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    table_stride,
    weight_stride,
    out_stride,
    scaled_stride,
    squares_stride,
    num_columns,
    HAS_NEXT_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    if HAS_NEXT_NORM:
        norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    # Decode attention, some kernels on, reads work list, lengths and tables before its wait.
    pdl_begin_late(PDL)
    row = tl.load(row_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token)
    is_live = row >= 0
    token_id = tl.load(token_table_ptr + row * table_stride + position, mask=is_live, other=0).to(
        tl.int64
    )
    values = tl.load(
        weight_ptr + token_id * weight_stride + columns, mask=mask & is_live, other=0.0
    )
    tl.store(out_ptr + token * out_stride + columns, values, mask=mask)
    if HAS_NEXT_NORM:
        h = values.to(tl.float32)
        scaled = (h * norm).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + token * scaled_stride + columns, scaled, mask=mask)
        squares_at = squares_ptr + token * squares_stride + tl.program_id(1)
        tl.store(squares_at, tl.sum(h * h, axis=0))


def embed(
    out: torch.Tensor,
    weight: torch.Tensor,
    token_table: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    pdl: bool = False,
    next_norm: NextNorm | None = None,
) -> ScaledInput | None:
    """out[t] = weight[token_table[token_rows[t], positions[t]]]; zeros where token_rows[t] is
    negative (padding).

    Args:
        out: [T, N], last dimension contiguous; written.
        weight: [V, N], last dimension contiguous, dtype of out.
        token_table: int32 [rows, max_len], every id read is in [0, V).
        token_rows, positions: int32 [T].
        pdl: launch while the kernel before still runs. What is launched behind starts only when
            all work before this kernel is done.
        next_norm: the norm of out, shared with the product behind it.

    Returns:
        With next_norm, what stands for that norm of out as the next product's x.
    """
    num_tokens, num_columns = out.shape
    block = min(2048, triton.next_power_of_2(num_columns))
    num_blocks = triton.cdiv(num_columns, block)
    _embed_kernel[(num_tokens, num_blocks)](
        out,
        weight,
        token_table,
        token_rows,
        positions,
        next_norm.weight if next_norm is not None else weight,
        next_norm.scaled if next_norm is not None else out,
        next_norm.squares if next_norm is not None else out,
        token_table.stride(0),
        weight.stride(0),
        out.stride(0),
        next_norm.scaled.stride(0) if next_norm is not None else 0,
        next_norm.squares.stride(0) if next_norm is not None else 0,
        num_columns,
        HAS_NEXT_NORM=next_norm is not None,
        BLOCK=block,
        num_warps=4,
        **pdl_options(out, pdl),
    )
    return None if next_norm is None else next_norm.input_of(num_blocks)


def embed_ref(
    weight: torch.Tensor,
    token_table: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The same in torch."""
    ids = token_table[token_rows.clamp_min(0).long(), positions.long()].long()
    return weight[ids] * (token_rows >= 0).to(weight.dtype)[:, None]
