"""The CPU sampler: exact filters, pruning that changes nothing, finite-logit flags."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.cpu.sampler import sample
from engine.cpu.tables import RowTables
from engine.plan import NewRow, StepPlan
from kernels.noise import gumbel_ref

VOCAB = 500
NO_IDS = np.zeros(0, np.int32)


def tables_with(*settings: Sampling, stop_ids: tuple[int, ...] = (), min_position: int = 0):
    tables = RowTables(len(settings), 64, 8, 99)
    stops = np.array(stop_ids, np.int32)
    new = tuple(
        NewRow(row, np.array([1], np.int32), 1, s, stops, min_position)
        for row, s in enumerate(settings)
    )
    zero = np.zeros(0, np.int32)
    tables.apply(StepPlan(0, new, zero, zero, zero, zero, zero, zero, np.zeros(0, np.bool_), 0))
    return tables


def draw(
    logits: torch.Tensor, tables: RowTables, position: int = 7
) -> tuple[list[int], list[bool]]:
    rows = np.arange(len(logits), dtype=np.int32)
    tokens, bad = sample(logits.clone(), rows, np.full(len(rows), position, np.int32), tables)
    return tokens.tolist(), bad.tolist()


def plain_choice(logits: np.ndarray, s: Sampling, position: int) -> int:
    """Decision by full sort and full noise, in float64."""
    scaled = logits.astype(np.float32) / np.float32(s.temperature)
    order = np.lexsort((np.arange(VOCAB), -scaled))
    if s.top_k:
        order = order[: s.top_k]
    weights = np.exp(scaled[order].astype(np.float64) - scaled.max())
    mass = np.cumsum(weights) / weights.sum()
    order = order[: int((mass < s.top_p).sum()) + 1]
    weights = np.exp(scaled[order].astype(np.float64) - scaled.max())
    order = np.sort(order[weights >= s.min_p])
    return int(order[np.argmax(scaled[order] + gumbel_ref(s.seed, position, order))])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.999999, "temperature": 1.7},
    ],
    ids=str,
)
def test_the_choice_equals_a_full_sort_with_noise_for_every_token(settings: dict) -> None:
    generator = np.random.default_rng(0)
    for seed in range(40):
        s = Sampling(**{"seed": seed, "temperature": 0.8, **settings})
        logits = generator.normal(0, 4, VOCAB).astype(np.float32)
        tokens, _ = draw(torch.from_numpy(logits)[None], tables_with(s), position=seed)
        assert tokens == [plain_choice(logits, s, seed)]


def test_temperature_zero_takes_the_lowest_of_equal_best_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [17, 301]] = 2.0
    assert draw(logits, tables_with(Sampling()))[0] == [17]


def test_tiny_temperatures_count_as_zero() -> None:
    logits = torch.randn(1, VOCAB)
    tokens, bad = draw(logits, tables_with(Sampling(temperature=1e-8, seed=3)))
    assert tokens == [int(logits.argmax())]
    assert bad == [False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_non_finite_logit_is_bad_and_its_neighbour_is_not(value: float) -> None:
    logits = torch.randn(2, VOCAB)
    clean = logits.clone()
    logits[0, 123] = value
    settings = (Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2))
    tokens, bad = draw(logits, tables_with(*settings))
    assert bad == [True, False]
    assert tokens[1] == draw(clean, tables_with(*settings))[0][1]


def test_stop_ids_wait_for_the_minimum_position() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    logits[0, 4] = 3.0
    tables = tables_with(Sampling(), stop_ids=(9,), min_position=8)
    assert draw(logits, tables, position=7)[0] == [4]
    assert draw(logits, tables, position=8)[0] == [9]


def test_a_flat_distribution_is_drawn_evenly() -> None:
    logits = torch.zeros(1, 4)
    counts = np.zeros(4, int)
    for seed in range(2000):
        counts[draw(logits, tables_with(Sampling(seed=seed, temperature=1.0)))[0][0]] += 1
    # Five standard deviations around 500: a false alarm once in a million runs.
    assert (abs(counts - 500) < 97).all()
