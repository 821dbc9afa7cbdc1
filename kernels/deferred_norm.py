"""An RMSNorm without a launch of its own, shared by the product before it and the one behind it.

RMSNorm(h) W^T = rsqrt(mean(h^2) + eps) * ((h * weight) W^T): the first factor is one number a row.
The product that makes h also leaves h * weight and, for each of its column tiles, the sum of h^2;
the product behind multiplies its finished sums by the factor. Each sum has its own place, so that
results do not vary from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_TILE_COLUMNS = 16
"""Fewest columns of a product's tile."""


@dataclass(frozen=True, slots=True)
class ScaledInput:
    """Stands for RMSNorm(h) as the input of a product.

    scaled [M, K]: h * weight, last dimension contiguous. squares float32 [M, tiles], last dimension
    contiguous: sums of h^2 that add up to those of the rows. eps: added to the mean square.
    """

    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class NextNorm:
    """The norm of a product's outputs, and where to leave what the next product needs of it.

    weight [N]. scaled [M, N], squares float32 [M, at least the product's column tiles], from
    `new_squares`: written. Last dimensions are contiguous. Types that have not float32's range may
    overflow in `scaled`.
    """

    weight: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float

    def input_of(self, num_tiles: int) -> ScaledInput:
        """What a product of num_tiles column tiles leaves; ValueError: more than there is room
        for."""
        room = self.squares.shape[1]
        if num_tiles > room:
            raise ValueError(
                f"NextNorm.squares has {room} columns for the product's {num_tiles} column tiles:"
                f" allocate it by new_squares"
            )
        return ScaledInput(self.scaled, self.squares[:, :num_tiles], self.eps)


def new_squares(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """`squares` for products of up to num_rows rows and num_columns outputs, in tiles of any
    size."""
    num_tiles = triton.cdiv(num_columns, MIN_TILE_COLUMNS)
    # Rows of 64 bytes: loads of several sums at once.
    return torch.zeros(num_rows, triton.cdiv(num_tiles, 16) * 16, device=device)


@triton.jit
def leave_scaled(
    h,
    norm,
    tile,
    columns,
    mask,
    scaled_ptr,
    scaled_stride,
    squares_ptr,
    squares_stride,
    num_tokens,
    BLOCK_M: tl.constexpr,
):
    """The end of the product before a norm: write h * weight and the sums of h^2 of a column tile.

    h [BLOCK_M, columns]: as rounded for the residual stream; norm [columns]: the weight; mask:
    which of h counts.
    """
    tokens = tl.arange(0, BLOCK_M)
    h32 = tl.where(mask, h.to(tl.float32), 0.0)
    scaled_at = scaled_ptr + tokens.to(tl.int64)[:, None] * scaled_stride + columns[None, :]
    scaled = h32 * norm.to(tl.float32)[None, :]
    tl.store(scaled_at, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)
    squares_at = squares_ptr + tokens * squares_stride + tile
    tl.store(squares_at, tl.sum(h32 * h32, axis=1), mask=tokens < num_tokens)


@triton.jit
def load_squares(
    squares_ptr, squares_stride, num_tokens, NUM_TILES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Sums of squares float32 [BLOCK_M, .] that add up to those of the rows."""
    # At most 4096 numbers at a time, so that few registers are taken.
    MOST: tl.constexpr = 4096 // BLOCK_M
    BLOCK: tl.constexpr = min(triton.next_power_of_2(NUM_TILES), MOST)
    tokens = tl.arange(0, BLOCK_M)
    tiles = tl.arange(0, BLOCK)
    is_row = tokens < num_tokens
    squares_at = squares_ptr + tokens[:, None] * squares_stride + tiles[None, :]
    squares = tl.load(squares_at, mask=is_row[:, None] & (tiles < NUM_TILES)[None, :], other=0.0)
    for begin in tl.static_range(BLOCK, NUM_TILES, BLOCK):
        mask = is_row[:, None] & (begin + tiles < NUM_TILES)[None, :]
        squares += tl.load(squares_at + begin, mask=mask, other=0.0)
    return squares


@triton.jit
def row_factors(squares, eps, K: tl.constexpr):
    """The end of the product behind a norm: rsqrt(mean(h^2) + eps) float32 [BLOCK_M] of rows of K
    features, whose sums are those of `load_squares`."""
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
