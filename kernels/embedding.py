"""Token embeddings, gathered through the device's token table: the host never sees the ids it feeds
back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pdl import pdl_begin_late, pdl_options


@triton.jit
def _embed_kernel(
    out_ptr,
    weight_ptr,
    token_table_ptr,
    row_ptr,
    position_ptr,
    table_stride,
    weight_stride,
    out_stride,
    num_columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
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


def embed(
    out: torch.Tensor,
    weight: torch.Tensor,
    token_table: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    pdl: bool = False,
) -> None:
    """out[t] = weight[token_table[token_rows[t], positions[t]]]; zeros where token_rows[t] is
    negative (padding).

    Args:
        out: [T, N], last dimension contiguous; written.
        weight: [V, N], last dimension contiguous, dtype of out.
        token_table: int32 [rows, max_len], every id read is in [0, V).
        token_rows, positions: int32 [T].
        pdl: launch while the kernel before still runs. What is launched behind starts only when
            all work before this kernel is done.
    """
    num_tokens, num_columns = out.shape
    block = min(2048, triton.next_power_of_2(num_columns))
    _embed_kernel[(num_tokens, triton.cdiv(num_columns, block))](
        out,
        weight,
        token_table,
        token_rows,
        positions,
        token_table.stride(0),
        weight.stride(0),
        out.stride(0),
        num_columns,
        BLOCK=block,
        num_warps=4,
        **pdl_options(out, pdl),
    )


def embed_ref(
    weight: torch.Tensor,
    token_table: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The same in torch."""
    ids = token_table[token_rows.clamp_min(0).long(), positions.long()].long()
    return weight[ids] * (token_rows >= 0).to(weight.dtype)[:, None]
