"""Products of a few rows whose weights are small: a program's whole share of them waits in shared
memory before the kernel that makes x has ended.

What such a product takes is not bytes but ways: through L2 for x, for a turn of a loop, for the
sums of other parts of K. Here the loads of the weights hide behind the kernel before, there is no
loop, and each warp sums a part of K of its own, so that no chain of products is long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.deferred_norm import load_squares
from kernels.pdl import pdl_options
from kernels.product_end import ProductEnd, end_product
from kernels.shared_memory import fits
from kernels.split_k import GemmWorkspace, add_parts

MAX_HELD_M = 16


@dataclass(frozen=True, slots=True)
class HeldTile:
    """Outputs per program, parts of K that are programs of their own, warps."""

    block_n: int
    split_k: int
    num_warps: int

    def chunk(self, k: int) -> int:
        """Numbers of K that a warp sums."""
        return triton.cdiv(k, self.split_k * self.num_warps * 16) * 16

    def shared_bytes(self, m: int, k: int, element_bytes: int, glu: bool) -> int:
        """Of the weights and of x, for m rows and a product of length k."""
        numbers = self.num_warps * triton.next_power_of_2(self.chunk(k))
        return (self.block_n * (2 if glu else 1) + _block_m(m)) * numbers * element_bytes


_HELD_TILES: dict[tuple[int, int], tuple[int, HeldTile]] = {
    # (N, K) -> most rows, tile; bench/step_search.py on one H200, bf16, whole steps of 8 rows
    (960, 576): (0, HeldTile(32, 1, 4)),  # a loop is faster by 16 us of 500
    (576, 576): (16, HeldTile(16, 1, 4)),  # 52 us of 617 faster than a loop
    (1536, 576): (16, HeldTile(16, 1, 4)),  # 17 us of 597
    (576, 1536): (16, HeldTile(16, 2, 4)),  # 52 us of 627
    (4096, 1024): (16, HeldTile(32, 1, 4)),  # 55 us of 1,089; at 16 rows 33 of 1,385
    (1024, 2048): (4, HeldTile(16, 2, 4)),  # at 2 rows 13 us of 692, at 8 nothing
    (1024, 3072): (8, HeldTile(16, 4, 4)),  # 52 us of 1,336
}


def held_tile(m: int, n: int, k: int, element_bytes: int, glu: bool) -> HeldTile | None:
    """Tile for m rows and a weight [n, k], with glu [2 n, k]; None: a loop over K is as quick, or
    shared memory does not hold it."""
    if element_bytes != 2:
        return None
    entry = _HELD_TILES.get((n, k))
    if entry is None and n <= 4096 and k <= 1024:  # a shape that nobody measured
        entry = 8, HeldTile(16 if glu or n <= 1024 else 32, 1, 4)
    most, tile = entry or (0, None)
    if tile is None or m > most or not fits(tile.shared_bytes(m, k, element_bytes, glu)):
        return None
    return tile


# Numbers that change from step to step: no new compilation when one becomes 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _held_gemm_kernel(
    out_ptr,
    x_ptr,
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
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_C: tl.constexpr = triton.next_power_of_2(CHUNK)
    block = tl.program_id(0)
    part = tl.program_id(1)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    token_mask = tokens < num_tokens
    # Rows past the end read the last one: their results are not stored.
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    inside = tl.arange(0, BLOCK_C)[None, None, :]
    k = (part * CHUNKS + tl.arange(0, CHUNKS))[:, None, None] * CHUNK + inside
    in_k = (inside < CHUNK) & (k < K)
    if PDL:
        gdc_launch_dependents()
    weight_at = weight_ptr + safe_rows[None, :, None] * weight_stride + k
    up_at = weight_at + num_rows.to(tl.int64) * weight_stride
    is_even: tl.constexpr = (BLOCK_C == CHUNK) and (K == CHUNK * CHUNKS * SPLIT_K)
    w = tl.load(weight_at) if is_even else tl.load(weight_at, mask=in_k, other=0.0)
    w_up = w
    if GLU:
        w_up = tl.load(up_at) if is_even else tl.load(up_at, mask=in_k, other=0.0)
    bias, residual, next_norm, squares = 0.0, 0.0, 0.0, 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + safe_rows)
    if HAS_NEXT_NORM:
        next_norm = tl.load(next_norm_ptr + safe_rows)
    if PDL:
        gdc_wait()
    long_tokens = tokens.to(tl.int64)
    x_mask = in_k & token_mask[None, :, None]
    x = tl.load(x_ptr + long_tokens[None, :, None] * x_stride + k, mask=x_mask, other=0.0)
    mask = token_mask[:, None] & row_mask[None, :]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + long_tokens[:, None] * residual_stride + rows[None, :]
        residual = tl.load(residual_at, mask=mask, other=0.0)
    if X_SQUARES > 0:
        squares = load_squares(x_squares_ptr, x_squares_stride, num_tokens, X_SQUARES, BLOCK_M)
    # Outputs in the rows of the dot: eight columns hold eight rows of x without padding.
    x = tl.permute(x, (0, 2, 1))
    acc = tl.trans(tl.sum(tl.dot(w, x, input_precision=DOT_PRECISION), axis=0))
    up_acc = acc
    if GLU:
        up_acc = tl.trans(tl.sum(tl.dot(w_up, x, input_precision=DOT_PRECISION), axis=0))
    is_final = True
    if SPLIT_K > 1:
        acc, is_final = add_parts(acc, partial_ptr, block, part, SPLIT_K, BLOCK_M, BLOCK_N)
    if is_final:
        end_product(
            acc, up_acc, squares, bias, residual, next_norm, block, rows, mask,
            out_ptr, out_stride, scaled_ptr, scaled_stride, squares_ptr, squares_stride,
            num_tokens, eps,
            K, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT_NORM, X_SQUARES, GLU, BLOCK_M,
        )  # fmt: skip


def held_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    end: ProductEnd,
    workspace: GemmWorkspace,
    tile: HeldTile,
    pdl: bool,
) -> None:
    """`kernels.small_gemm.small_linear` for at most MAX_HELD_M rows in this way.

    Args:
        out [M, N], x [M, K], weight [N, K] or [2 N, K]: as there.
        end, workspace: for what becomes of the sums.
        tile: with parts of K a program has a number of the tile for each of its threads at least.

    Raises:
        ValueError: more rows than MAX_HELD_M; parts of K with fewer numbers than threads.
    """
    num_tokens, k = x.shape
    block_m = _block_m(num_tokens)
    if num_tokens > MAX_HELD_M:
        raise ValueError(f"a HeldTile takes up to {MAX_HELD_M} rows, x has {num_tokens}")
    if tile.split_k > 1 and block_m * tile.block_n < 32 * tile.num_warps:
        raise ValueError(
            f"{tile} with {block_m} rows has fewer numbers than threads: take fewer warps,"
            " or no parts of K"
        )
    num_blocks = triton.cdiv(end.num_outputs(weight), tile.block_n)
    _held_gemm_kernel[(num_blocks, tile.split_k)](
        out, x, weight, *end.arguments(out, x, weight, workspace.partials), **end.constants(x),
        BLOCK_M=block_m, BLOCK_N=tile.block_n, CHUNK=tile.chunk(k), CHUNKS=tile.num_warps,
        SPLIT_K=tile.split_k, DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, **pdl_options(out, pdl),
    )  # fmt: skip


def _block_m(num_tokens: int) -> int:
    return 8 if num_tokens <= 8 else 16
