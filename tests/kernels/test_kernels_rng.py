"""Philox and Gumbel: the three implementations are one function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import rng
from tests.kernels.util import DEVICE

SEEDS = [0, 1, 0xDEADBEEF, 0x123456789ABCDEF0, 0xFFFFFFFFFFFFFFFF]


def as_int64(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def test_philox_matches_the_published_test_vectors() -> None:
    """Known answers of the Random123 distribution for 10 rounds."""
    zero = np.zeros((), np.uint32)
    ones = np.full((), 0xFFFFFFFF, np.uint32)
    words = [int(w) for w in rng.philox_4x32_10(0, zero, zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = [int(w) for w in rng.philox_4x32_10(0xFFFFFFFFFFFFFFFF, ones, ones, ones, ones)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", SEEDS)
def test_device_and_torch_noise_equal_the_numpy_reference(seed: int) -> None:
    positions = [0, 1, 4095, 1 << 30]
    vocab_size = 1537
    ids = np.arange(vocab_size)
    expected = np.stack([rng.gumbel_ref(seed, position, ids) for position in positions])
    seeds = torch.full((len(positions),), as_int64(seed), dtype=torch.int64, device=DEVICE)
    position_rows = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    out = torch.full((len(positions), vocab_size), float("nan"), device=DEVICE)
    rng.gumbel_rows(out, seeds, position_rows)
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=2e-6, atol=2e-6)
    by_torch = rng.gumbel_torch_ref(
        seeds[:, None], position_rows[:, None], torch.arange(vocab_size, device=DEVICE)[None]
    )
    np.testing.assert_allclose(by_torch.cpu().numpy(), expected, rtol=2e-6, atol=2e-6)


def test_noise_has_the_moments_and_the_bounds_of_a_gumbel_variable() -> None:
    """Mean 0.5772 and variance pi^2 / 6; the standard errors at this size are 0.0013 and 0.0046."""
    noise = np.concatenate([rng.gumbel_ref(7, p, np.arange(50_000)) for p in range(20)])
    assert abs(float(noise.mean()) - 0.57722) < 0.008
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.03
    assert noise.min() > rng.GUMBEL_MIN
    assert noise.max() < rng.GUMBEL_MAX


def test_extreme_words_give_finite_noise() -> None:
    for word in (0, 0xFFFFFFFF):
        u = (np.float32(word >> 9) + np.float32(0.5)) * np.float32(2.0**-23)
        noise = -np.log(-np.log(u))
        assert rng.GUMBEL_MIN < noise < rng.GUMBEL_MAX
