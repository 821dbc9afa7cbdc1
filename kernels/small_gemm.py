"""Linear layers of a small decode batch: memory-bound GEMM with its neighbours fused and its
weights read ahead.

For N too small to fill the GPU, K is split: each program leaves a partial tile, that of the last
part adds them up in order, so results do not vary from run to run. A norm between two products
may be shared by their ends: see deferred_norm.py. Small weights of few rows have no loop over K:
see held_gemm.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.deferred_norm import NextNorm, ScaledInput, load_squares
from kernels.descriptors import takes_descriptors, tiles_of
from kernels.fixed_gemm_tile import sum_by_descriptors, sum_by_pointers
from kernels.gemv import gemv
from kernels.held_gemm import HeldTile, held_linear, held_tile
from kernels.norm import rms_norm
from kernels.pdl import pdl_options, prefetch_l2
from kernels.product_end import ProductEnd, end_product
from kernels.product_tiles import SmallGemmTile, small_gemm_tile
from kernels.shared_memory import fitting_stages
from kernels.split_k import GemmWorkspace, add_parts

MAX_SMALL_M = 256

ProductTile = SmallGemmTile | HeldTile


def product_tile(m: int, n: int, k: int, element_bytes: int, glu: bool) -> ProductTile:
    """Tile of small_linear for m rows and a weight [n, k], with glu [2 n, k]."""
    shape = (m, n, k, element_bytes)
    return held_tile(*shape, glu) or small_gemm_tile(*shape)


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _small_gemm_kernel(
    out_ptr,
    x,
    weight,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    x_squares_ptr,
    next_norm_ptr,
    scaled_ptr,
    squares_ptr,
    partial_ptr,
    num_tokens,
    num_rows,
    out_stride,
    x_stride,
    weight_stride,
    residual_stride,
    x_squares_stride,
    scaled_stride,
    squares_stride,
    eps,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT_NORM: tl.constexpr,
    X_SQUARES: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """x and weight: pointers, or with TMA descriptors; weight_ptr: a pointer always."""
    SPLIT_LEN: tl.constexpr = ((K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K)) * BLOCK_K
    # Row tiles of a column tile are neighbours: they share its weights in the L2 cache.
    block = tl.program_id(0) // ROW_TILES
    k_begin = tl.program_id(1) * SPLIT_LEN
    row_tile = 0
    if ROW_TILES > 1:
        row_tile = tl.program_id(0) % ROW_TILES
        first = row_tile * BLOCK_M
        num_tokens -= first
        out_ptr += first * out_stride
        residual_ptr += first * residual_stride
        x_squares_ptr += first * x_squares_stride
        scaled_ptr += first * scaled_stride
        squares_ptr += first * squares_stride
        if not TMA:
            x += first * x_stride
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    row_mask = rows < num_rows
    token_mask = tokens < num_tokens
    # Rows past the end read the last one: no mask in the loop, their results are not stored.
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    weight_at = weight_ptr + safe_rows[:, None] * weight_stride + columns[None, :]
    bias, residual, next_norm, squares = 0.0, 0.0, 0.0, 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + safe_rows)
    if HAS_NEXT_NORM:
        next_norm = tl.load(next_norm_ptr + safe_rows)
    if PDL:
        gdc_launch_dependents()
        LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, PREFETCH_LINES) * LINE
        line_at = weight_ptr + safe_rows[:, None] * weight_stride + k_begin + lines[None, :]
        prefetch_l2(line_at)
        if GLU:
            prefetch_l2(line_at + num_rows.to(tl.int64) * weight_stride)
        gdc_wait()
    # What the end needs of the kernels before is asked for here: its way takes as long as some
    # turns of the loop.
    mask = token_mask[:, None] & row_mask[None, :]
    long_tokens = tokens.to(tl.int64)[:, None]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + long_tokens * residual_stride + rows[None, :]
        residual = tl.load(residual_at, mask=mask, other=0.0)
    if X_SQUARES > 0:
        squares = load_squares(x_squares_ptr, x_squares_stride, num_tokens, X_SQUARES, BLOCK_M)
    k_end = min(k_begin + SPLIT_LEN, K)
    if TMA:
        acc, up_acc = sum_by_descriptors(
            x, weight, row_tile, block, k_begin, k_end, num_rows,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, GLU,
        )  # fmt: skip
    else:
        # Addresses of the weight are found before the wait.
        acc, up_acc = sum_by_pointers(
            x + long_tokens * x_stride + columns[None, :],
            weight_at, weight_at + num_rows.to(tl.int64) * weight_stride,
            token_mask[:, None], k_begin, k_end,
            K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT_PRECISION, GLU,
        )  # fmt: skip
    is_final = True
    if SPLIT_K > 1:
        acc, is_final = add_parts(
            acc, partial_ptr, tl.program_id(0), tl.program_id(1), SPLIT_K, BLOCK_M, BLOCK_N
        )
    if is_final:
        end_product(
            acc, up_acc, squares, bias, residual, next_norm, block, rows, mask,
            out_ptr, out_stride, scaled_ptr, scaled_stride, squares_ptr, squares_stride,
            num_tokens, eps,
            K, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT_NORM, X_SQUARES, GLU, BLOCK_M,
        )  # fmt: skip


def small_linear(
    out: torch.Tensor,
    x: torch.Tensor | ScaledInput,
    weight: torch.Tensor,
    workspace: GemmWorkspace,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_scratch: torch.Tensor | None = None,
    glu: bool = False,
    residual: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = True,
    tile: ProductTile | None = None,
) -> ScaledInput | None:
    """out = f(x) W^T + bias + residual, for at most MAX_SMALL_M rows; glu: silu(f(x) Wg^T) * f(x)
    Wu^T.

    f is the identity; or RMSNorm(x) = x / sqrt(mean(x^2) + eps) * norm_weight where norm_weight is
    given; or the norm whose input a ScaledInput stands for.

    Args:
        out: [M, N], last dimension contiguous, float32 or the dtype of x; written. May be
            residual, not x.
        x: [M, K], last dimension contiguous; or what the product before has returned for its
            next_norm.
        weight: [N, K], or [2 N, K] with the gate's rows first when glu; last dimension contiguous,
            dtype of x.
        workspace: from new_gemm_workspace; one per stream.
        bias: [N], not with glu. norm_weight: [K]. eps: of that norm.
        norm_scratch: [M, K] of x's dtype; overwritten: several rows are normed into it by a launch
            of its own.
        residual: [M, N], last dimension contiguous.
        next_norm: the norm of out, which the next product takes in place of a launch for it. What
            it writes may not overlap x or residual.
        pdl: launch while the kernel before still runs. tile: None: from the tables; a HeldTile:
            without a loop over K (see held_gemm.py).

    Returns:
        With next_norm, what stands for that norm of out as the next product's x.

    Raises:
        ValueError: more rows than MAX_SMALL_M; both glu and a bias; a norm of several rows without
            norm_scratch; a next_norm without room for the product's column tiles.
    """
    squares = x.squares if isinstance(x, ScaledInput) else None
    if isinstance(x, ScaledInput):
        eps, norm_weight, x = x.eps, None, x.scaled
    num_tokens, (num_rows, k) = len(x), weight.shape
    if num_tokens > MAX_SMALL_M:
        raise ValueError(f"small_linear takes up to {MAX_SMALL_M} rows, x has {num_tokens}")
    if glu and bias is not None:
        raise ValueError("small_linear has no bias with glu")
    if glu:
        num_rows //= 2
    if num_tokens == 1 and tile is None and squares is None and next_norm is None:
        gemv(
            out, x, weight, bias=bias, norm_weight=norm_weight, eps=eps,
            glu=glu, residual=residual, pdl=pdl,
        )  # fmt: skip
        return None
    if norm_weight is not None:
        if norm_scratch is None:
            raise ValueError(f"norm_scratch is None: small_linear norms {num_tokens} rows into it")
        rms_norm(norm_scratch, x, norm_weight, eps, pdl=pdl)
        x = norm_scratch
    if tile is None:
        tile = product_tile(num_tokens, num_rows, k, x.element_size(), glu)
    num_blocks, block_m = triton.cdiv(num_rows, tile.block_n), _block_m(num_tokens)
    scaled_out = None if next_norm is None else next_norm.input_of(num_blocks)
    num_tiles = num_blocks * triton.cdiv(num_tokens, block_m)
    if glu or not workspace.holds(num_tiles, tile.split_k, block_m * tile.block_n):
        tile = replace(tile, split_k=1)
    end = ProductEnd(bias, residual, squares, next_norm, eps, glu)
    if isinstance(tile, HeldTile):
        held_linear(out, x, weight, end, workspace, tile, pdl)
    else:
        _looped_linear(out, x, weight, end, workspace, tile, pdl)
    return scaled_out


def _block_m(num_tokens: int) -> int:
    """Beyond 16 rows the 64-row matrix instruction beats two or three 16-row ones."""
    return 16 if num_tokens <= 16 else 64


def _looped_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    end: ProductEnd,
    workspace: GemmWorkspace,
    tile: SmallGemmTile,
    pdl: bool,
) -> None:
    """`small_linear` by a loop over K."""
    block_m, size, num_rows = _block_m(len(x)), x.element_size(), end.num_outputs(weight)
    tma, row_tiles = tile.tma and takes_descriptors(x, weight), triton.cdiv(len(x), block_m)
    _small_gemm_kernel[(triton.cdiv(num_rows, tile.block_n) * row_tiles, tile.split_k)](
        out,
        tiles_of(x, block_m, tile.block_k) if tma else x,
        tiles_of(weight, tile.block_n, tile.block_k) if tma else weight,
        weight,
        *end.arguments(out, x, weight, workspace.partials),
        **end.constants(x),
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        ROW_TILES=row_tiles,
        SPLIT_K=tile.split_k,
        STAGES=fitting_stages(tile.num_stages, tile.stage_bytes(block_m, end.glu, size)),
        PREFETCH_LINES=max(tile.block_k * size // 128, 1) * tile.prefetch_tiles,
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        TMA=tma,
        num_warps=tile.num_warps,
        **pdl_options(out, pdl),
    )


def small_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same in torch, in `dtype` throughout (float64 for tests)."""
    a = x.to(dtype)
    if norm_weight is not None:
        a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    y = a @ weight.to(dtype).T
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    if bias is not None:
        y = y + bias.to(dtype)
    return y if residual is None else y + residual.to(dtype)
