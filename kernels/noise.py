"""The sampler's random numbers in NumPy: the reference of kernels/rng.py, and the CPU's noise.

Philox-4x32-10 has no state: the noise of a token depends on nothing but (seed, position, token id),
so a row draws the same token in any batch, after a preemption and after a restart.

Formula: x = first word of Philox(key = seed, counter = (token id, position, 0, 0)); u = ((x >> 9)
+ 0.5) * 2^-23; g = -log(-log(u)). 23 bits and not 24, because n + 0.5 is then exact in float32:
with 24 bits the largest word would round to u = 1 and g to infinity, once in 2^24 tokens, which a
vocabulary of 150,000 meets every hundred samples.

A file of its own without torch and triton: a worker on the CPU installs no Triton.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GUMBEL_MIN = -2.9
"""Below every possible noise value: -log(-log(2^-24)) = -2.81."""
GUMBEL_MAX = 16.7
"""Above every possible noise value: -log(-log(1 - 2^-24)) = 16.64."""
GUMBEL_SPAN = GUMBEL_MAX - GUMBEL_MIN
"""A token whose scaled logit is this far below the best one can never win."""

ROUNDS = 10
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF

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
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    words = np.broadcast_arrays(c0, c1, c2, c3)
    w0, w1, w2, w3 = (word.astype(np.uint64) for word in words)
    mask, shift = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        product_a = w0 * np.uint64(ROUND_A)
        product_b = w2 * np.uint64(ROUND_B)
        w0 = (product_b >> shift) ^ w1 ^ np.uint64(k0)
        w2 = (product_a >> shift) ^ w3 ^ np.uint64(k1)
        w1 = product_b & mask
        w3 = product_a & mask
        k0, k1 = (k0 + KEY_A) & MASK, (k1 + KEY_B) & MASK
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
