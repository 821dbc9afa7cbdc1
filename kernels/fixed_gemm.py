"""GEMM whose rows do not depend on the batch: the order of the sum is fixed, whatever M is.

For the deterministic mode. K is cut into parts by the weight's shape alone; within a part every row
is summed by the same matrix instruction in the same steps, and the parts are added in order. Where
a part is summed (one program after the other parts, or a program of its own, whose partial tile the
one of the last part adds up) changes nothing. Programs of a group share weight tiles through L2.
With `glu` a program sums the tile of the gate and that of the up projection side by side, each in
this order, and writes silu(gate) * up only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.descriptors import takes_descriptors, tiles_of
from kernels.fixed_gemm_tile import place_tile, store_tile, sum_tile
from kernels.fixed_tiles import (
    FEW_ROWS,
    SPLIT_UNIT,
    FixedGemmTile,
    fixed_gemm_tile,
    fixed_splits,
)
from kernels.pdl import pdl_options, prefetch_l2
from kernels.shared_memory import fitting_stages
from kernels.split_k import GemmWorkspace, add_parts

GROUP_M = 8
"""Row tiles that are walked before the next column tile, so that they share weight tiles in L2."""


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_gemm_kernel(
    out_ptr,
    x,
    weight,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    num_tokens,
    num_rows,
    out_stride,
    x_stride,
    weight_stride,
    residual_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    PARALLEL: tl.constexpr,
    PERSISTENT: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        if PREFETCH_LINES > 0:
            LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            _, first_n = place_tile(first, num_tokens, num_rows, GROUP, BLOCK_M, BLOCK_N)
            rows = tl.minimum(first_n * BLOCK_N + tl.arange(0, BLOCK_N), num_rows - 1).to(tl.int64)
            lines = tl.program_id(1) * SPLIT_LEN + tl.arange(0, PREFETCH_LINES) * LINE
            lines = tl.minimum(lines, K - 1)
            line_at = weight_ptr + rows[:, None] * weight_stride + lines[None, :]
            prefetch_l2(line_at)
            if GLU:
                prefetch_l2(line_at + num_rows.to(tl.int64) * weight_stride)
        gdc_wait()
    if PERSISTENT:
        num_tiles = tl.cdiv(num_tokens, BLOCK_M) * tl.cdiv(num_rows, BLOCK_N)
        for tile in tl.range(first, num_tiles, tl.num_programs(0), flatten=True):
            tile_m, tile_n = place_tile(tile, num_tokens, num_rows, GROUP, BLOCK_M, BLOCK_N)
            acc, up_acc = sum_tile(
                x, weight, tile_m, tile_n, 0, K, num_tokens, num_rows, x_stride, weight_stride,
                K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, TMA, GLU,
            )  # fmt: skip
            store_tile(
                acc, up_acc, tile_m, tile_n, out_ptr, bias_ptr, residual_ptr,
                num_tokens, num_rows, out_stride, residual_stride,
                HAS_BIAS, HAS_RESIDUAL, GLU, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        return
    tile_m, tile_n = place_tile(first, num_tokens, num_rows, GROUP, BLOCK_M, BLOCK_N)
    is_final = True
    if PARALLEL:
        begin = tl.program_id(1) * SPLIT_LEN
        acc, up_acc = sum_tile(
            x, weight, tile_m, tile_n, begin, min(begin + SPLIT_LEN, K),
            num_tokens, num_rows, x_stride, weight_stride,
            K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, TMA, GLU,
        )  # fmt: skip
        acc, is_final = add_parts(
            acc, partial_ptr, first, tl.program_id(1), SPLITS, BLOCK_M, BLOCK_N
        )
    elif SPLITS > 1:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for split in range(SPLITS):
            begin = split * SPLIT_LEN
            part, up_part = sum_tile(
                x, weight, tile_m, tile_n, begin, min(begin + SPLIT_LEN, K),
                num_tokens, num_rows, x_stride, weight_stride,
                K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, TMA, GLU,
            )  # fmt: skip
            acc += part
            if GLU:
                up_acc += up_part
    else:
        acc, up_acc = sum_tile(
            x, weight, tile_m, tile_n, 0, K, num_tokens, num_rows, x_stride, weight_stride,
            K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, TMA, GLU,
        )  # fmt: skip
    if is_final:
        store_tile(
            acc, up_acc, tile_m, tile_n, out_ptr, bias_ptr, residual_ptr,
            num_tokens, num_rows, out_stride, residual_stride,
            HAS_BIAS, HAS_RESIDUAL, GLU, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def fixed_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    workspace: GemmWorkspace | None = None,
    pdl: bool = False,
    tile: FixedGemmTile | None = None,
    splits: int = 0,
    glu: bool = False,
) -> None:
    """out = x W^T + bias + residual, or with glu silu(x Wg^T) * x Wu^T + residual; a row's bits
    depend on that row of x and of residual only, not on M or its place.

    Args:
        out: [M, N], last dimension contiguous, float32 or the dtype of x; written. May be
            residual, not x.
        x: [M, K], last dimension contiguous.
        weight: [N, K], or [2 N, K] with the gate's rows first when glu; last dimension contiguous,
            dtype of x.
        bias: [N], not with glu. residual: [M, N], last dimension contiguous.
        workspace: where parts of K may be summed side by side; one per stream. None, or one too
            small, or glu: one after the other.
        pdl: launch while the kernel before still runs.
        tile: None: from the table. splits: parts of K, part of the numerics; 0: from the table, or
            one with glu.

    Raises:
        ValueError: both glu and a bias.
    """
    if glu and bias is not None:
        raise ValueError("fixed_linear has no bias with glu: leave one of the two out")
    num_tokens = x.shape[0]
    num_rows, k = out.shape[1], weight.shape[1]
    if tile is None:
        tile = fixed_gemm_tile(num_tokens, num_rows, k, x.dtype, glu)
    splits = splits or (1 if glu else fixed_splits(num_rows, k, x.dtype))
    tiles = triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(num_rows, tile.block_n)
    parallel = (
        tile.parallel
        and splits > 1
        and not glu
        and workspace is not None
        and workspace.holds(tiles, splits, tile.block_m * tile.block_n)
    )
    # A loop over tiles has the next one's loads beside the stored one: no room for 4-byte outputs.
    persistent = tile.persistent and splits == 1 and out.element_size() == 2
    tma = tile.tma and takes_descriptors(x, weight)
    programs = min(tiles, _num_processors(x)) if persistent else tiles
    is_memory_bound = num_tokens <= FEW_ROWS
    _fixed_gemm_kernel[(programs, splits if parallel else 1)](
        out,
        tiles_of(x, tile.block_m, tile.block_k) if tma else x,
        tiles_of(weight, tile.block_n, tile.block_k) if tma else weight,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else x,
        workspace.partials if workspace is not None and parallel else out,
        num_tokens,
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        residual.stride(0) if residual is not None else 0,
        K=k,
        SPLITS=splits,
        SPLIT_LEN=triton.cdiv(k, splits * SPLIT_UNIT) * SPLIT_UNIT,
        PARALLEL=parallel,
        PERSISTENT=persistent,
        TMA=tma,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GLU=glu,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=GROUP_M,
        STAGES=fitting_stages(tile.num_stages, tile.stage_bytes(glu, x.element_size())),
        PREFETCH_LINES=2 * tile.block_k * x.element_size() // 128 if is_memory_bound else 0,
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        **pdl_options(out, pdl),
    )


def _num_processors(tensor: torch.Tensor) -> int:
    """Streaming multiprocessors of the tensor's device; 4 where it is no GPU."""
    if not tensor.is_cuda:
        return 4
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def fixed_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    glu: bool = False,
) -> torch.Tensor:
    """The same in torch, in `dtype` (float64 for tests)."""
    y = x.to(dtype) @ weight.to(dtype).T
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    if bias is not None:
        y = y + bias.to(dtype)
    return y if residual is None else y + residual.to(dtype)
