"""The sampler's random numbers on the device: Gumbel noise from a counter.

The formula and the NumPy reference are in kernels/noise.py; here are the torch reference and the
Triton device function.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.noise import GUMBEL_MAX as GUMBEL_MAX
from kernels.noise import GUMBEL_MIN as GUMBEL_MIN
from kernels.noise import GUMBEL_SPAN as GUMBEL_SPAN
from kernels.noise import KEY_A, KEY_B, MASK, ROUND_A, ROUND_B, ROUNDS
from kernels.noise import gumbel_ref as gumbel_ref
from kernels.noise import philox_4x32_10 as philox_4x32_10


def gumbel_torch_ref(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Gumbel noise of many rows at once, in torch; the shapes of the arguments broadcast.

    Args:
        seeds: int64, the 64-bit seeds' bits.
        positions: int32 or int64, absolute positions of the tokens to be sampled.
        token_ids: int32 or int64, in [0, 2^31).

    Returns:
        float32 of the broadcast shape, on the device of the arguments.
    """
    w0, position, seed = torch.broadcast_tensors(token_ids.long(), positions.long(), seeds)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    w1, w2, w3 = position, torch.zeros_like(w0), torch.zeros_like(w0)
    for _ in range(ROUNDS):
        # The products wrap in int64; the masks after the shifts drop the sign.
        product_a, product_b = w0 * ROUND_A, w2 * ROUND_B
        w0 = ((product_b >> 32) & MASK) ^ w1 ^ k0
        w2 = ((product_a >> 32) & MASK) ^ w3 ^ k1
        w1, w3 = product_b & MASK, product_a & MASK
        k0, k1 = (k0 + KEY_A) & MASK, (k1 + KEY_B) & MASK
    u = ((w0 >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


@triton.jit
def gumbel(seed, position, token_ids):
    """Noise on the device, float32 [token_ids.shape]; seed int64, position and token_ids int32."""
    x, _, _, _ = tl.philox(seed, token_ids, position, 0, 0)
    u = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u))


@triton.jit
def _gumbel_rows_kernel(out_ptr, seed_ptr, position_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), token_ids)
    tl.store(out_ptr + row * vocab_size + token_ids, noise, mask=token_ids < vocab_size)


def gumbel_rows(out: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    """Write the noise of every token of the vocabulary for some rows (tests; the sampler fuses it).

    Args:
        out: float32 [R, V], contiguous; written.
        seeds: int64 [R]. positions: int32 [R].
    """
    num_rows, vocab_size = out.shape
    block = 1024
    grid = (num_rows, triton.cdiv(vocab_size, block))
    _gumbel_rows_kernel[grid](out, seeds, positions, vocab_size, BLOCK=block)
