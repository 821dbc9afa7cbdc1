"""GEMM whose rows do not depend on the batch: the tiles and the order of the sum are fixed,
whatever M is.

For the deterministic mode. Every row is summed over K in steps of BLOCK_K by the same matrix
instruction, without splitting K; only the number of row tiles varies with M. Programs of a group
share weight tiles through the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import pdl_options
from kernels.tiles import FixedGemmTile, fixed_gemm_tile

GROUP_M = 8
"""Row tiles that are walked before the next column tile, so that they share weight tiles in L2."""


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_gemm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    k_len,
    out_stride,
    x_stride,
    weight_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(num_rows, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * num_n)
    group_m = tl.minimum(num_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * num_n)) % group_m
    tile_n = (program % (GROUP * num_n)) // group_m
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    safe_tokens = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    x_at = x_ptr + safe_tokens[:, None] * x_stride + columns[None, :]
    weight_at = weight_ptr + safe_rows[:, None] * weight_stride + columns[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, k_len, BLOCK_K, num_stages=STAGES):
        mask = columns[None, :] < k_len - k
        x = tl.load(x_at + k, mask=mask, other=0.0)
        w = tl.load(weight_at + k, mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=DOT_PRECISION)
    mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + safe_rows).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + safe_tokens[:, None] * residual_stride + rows[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + safe_tokens[:, None] * out_stride + rows[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def fixed_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    tile: FixedGemmTile | None = None,
) -> None:
    """out = x W^T + bias + residual; a row's bits depend on that row of x only, not on M or its
    place.

    Args:
        out: [M, N], last dimension contiguous, float32 or the dtype of x; written. May be
            residual, not x.
        x: [M, K], last dimension contiguous. weight: [N, K], last dimension contiguous, dtype of x.
        bias: [N]. residual: [M, N], last dimension contiguous.
        pdl: launch while the kernel before still runs.
        tile: None: from the table.
    """
    num_tokens = x.shape[0]
    num_rows, k = weight.shape
    if tile is None:
        tile = fixed_gemm_tile(num_tokens, num_rows, x.dtype)
    grid = (triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(num_rows, tile.block_n),)
    _fixed_gemm_kernel[grid](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else x,
        num_tokens,
        num_rows,
        k,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        residual.stride(0) if residual is not None else 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=GROUP_M,
        STAGES=tile.num_stages,
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        **pdl_options(out, pdl),
    )


def fixed_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests)."""
    y = x.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        y = y + bias.to(dtype)
    return y if residual is None else y + residual.to(dtype)
