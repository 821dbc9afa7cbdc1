"""The sampler's random numbers: Gumbel noise from a counter, keyed by (seed, position, token id).

Philox-4x32-10 has no state: the noise of a token depends on nothing but these three, so a row
draws the same token in any batch, after a preemption and after a restart. NumPy and torch
references and a Triton device function.

Formula: x = first word of Philox(key = seed, counter = (token id, position, 0, 0)); u = ((x >> 9)
+ 0.5) * 2^-23; g = -log(-log(u)). 23 bits and not 24, because n + 0.5 is then exact in float32:
with 24 bits the largest word would round to u = 1 and g to infinity, once in 2^24 tokens, which a
vocabulary of 150,000 meets every hundred samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

GUMBEL_MIN = -2.9
"""Below every possible noise value: -log(-log(2^-24)) = -2.81."""
GUMBEL_MAX = 16.7
"""Above every possible noise value: -log(-log(1 - 2^-24)) = 16.64."""
GUMBEL_SPAN = GUMBEL_MAX - GUMBEL_MIN
"""A token whose scaled logit is this far below the best one can never win."""

_ROUNDS = 10
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

Uint32Array = npt.NDArray[np.uint32]


def philox_4x32_10(
    seed: int, c0: Uint32Array, c1: Uint32Array, c2: Uint32Array, c3: Uint32Array
) -> tuple[Uint32Array, Uint32Array, Uint32Array, Uint32Array]:
    """Philox-4x32 with 10 rounds.

    Args:
        seed: 64-bit key, low word first; negative values count as two's complement.
        c0, c1, c2, c3: uint32 counter words, of shapes that broadcast.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    words = np.broadcast_arrays(c0, c1, c2, c3)
    w0, w1, w2, w3 = (word.astype(np.uint64) for word in words)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    for _ in range(_ROUNDS):
        product_a = w0 * np.uint64(_ROUND_A)
        product_b = w2 * np.uint64(_ROUND_B)
        w0 = (product_b >> shift) ^ w1 ^ np.uint64(k0)
        w2 = (product_a >> shift) ^ w3 ^ np.uint64(k1)
        w1 = product_b & mask
        w3 = product_a & mask
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return (
        w0.astype(np.uint32),
        w1.astype(np.uint32),
        w2.astype(np.uint32),
        w3.astype(np.uint32),
    )


def gumbel_ref(
    seed: int, position: int, token_ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.float32]:
    """Gumbel noise of some tokens at one position, in NumPy.

    Args:
        seed: the request's 64-bit seed.
        position: absolute position in the sequence of the token to be sampled.
        token_ids: integers of any shape, each in [0, 2^32).

    Returns:
        float32 of the shape of token_ids, each in (GUMBEL_MIN, GUMBEL_MAX).
    """
    zero = np.zeros((), np.uint32)
    ids = np.asarray(token_ids).astype(np.uint32)
    x, _, _, _ = philox_4x32_10(seed, ids, np.asarray(position, np.uint32), zero, zero)
    u = ((x >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(u))


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
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    w1, w2, w3 = position, torch.zeros_like(w0), torch.zeros_like(w0)
    for _ in range(_ROUNDS):
        # The products wrap in int64; the masks after the shifts drop the sign.
        product_a, product_b = w0 * _ROUND_A, w2 * _ROUND_B
        w0 = ((product_b >> 32) & _MASK) ^ w1 ^ k0
        w2 = ((product_a >> 32) & _MASK) ^ w3 ^ k1
        w1, w3 = product_b & _MASK, product_a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
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
