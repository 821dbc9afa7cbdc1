"""Penalties on the CPU: the numbers, whom they touch, and that only a run's own tokens count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.cpu.penalties import RowPenalties
from engine.cpu.sampler import sample
from engine.cpu.tables import RowTables
from engine.plan import NewRow, StepPlan

VOCAB = 300
NONE = np.zeros(0, np.int32)
PROMPT = np.array([5, 5, 9, 200, 17], np.int32)
OUTPUT = np.array([9, 40, 40, 40, 299, 0], np.int32)
SETTINGS = {
    "repetition": Sampling(repetition_penalty=1.3),
    "repetition below 1": Sampling(repetition_penalty=0.6),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=-0.7),
    "all": Sampling(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.9),
}


def expected_logits(raw: np.ndarray, prompt: np.ndarray, output: np.ndarray, s: Sampling):
    """Token by token, as the definition reads."""
    logits = raw.astype(np.float64)
    for token in range(len(raw)):
        count = output.tolist().count(token)
        if count or token in prompt.tolist():
            factor = s.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= s.frequency_penalty * count
        logits[token] -= s.presence_penalty * (count > 0)
    return logits


def tables_with(*rows: tuple[Sampling, np.ndarray, np.ndarray]) -> RowTables:
    tables = RowTables(max(len(rows), 1), 64, 8, 99)
    put(tables, *rows)
    return tables


def put(tables: RowTables, *rows: tuple[Sampling, np.ndarray, np.ndarray]) -> None:
    """Give row 0, 1, ... to these runs: settings, prompt, output of an earlier attempt."""
    new = tuple(
        NewRow(row, np.concatenate([prompt, prefix]), len(prompt), s, NONE, 0)
        for row, (s, prompt, prefix) in enumerate(rows)
    )
    tables.apply(StepPlan(0, new, NONE, NONE, NONE, NONE, NONE, NONE, np.zeros(0, np.bool_), 0))


def draw(logits: torch.Tensor, tables: RowTables, *positions: int) -> list[int]:
    rows = np.arange(len(logits), dtype=np.int32)
    tokens, bad = sample(logits, rows, np.array(positions, np.int32), tables)
    assert not bad.any()
    return tokens.tolist()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits_are_those_of_the_definition_step_after_step(settings: Sampling) -> None:
    generator = np.random.default_rng(3)
    penalties = RowPenalties(settings, len(PROMPT))
    tokens = np.concatenate([PROMPT, OUTPUT])
    for length in (len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 4, len(tokens)):
        raw = generator.normal(0, 4, VOCAB).astype(np.float32)
        expected = expected_logits(raw, PROMPT, tokens[len(PROMPT) : length], settings)
        penalties.apply(raw, tokens[:length])
        np.testing.assert_allclose(raw, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_come_before_the_choice_greedy_or_not(temperature: float) -> None:
    settings = SETTINGS["all"]._replace(temperature=temperature, seed=4)
    raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    position = len(PROMPT) + len(OUTPUT)
    expected = torch.from_numpy(expected_logits(raw[0].numpy(), PROMPT, OUTPUT, settings))
    neutral = Sampling(temperature=temperature, seed=4)
    plain = draw(expected.float()[None], tables_with((neutral, PROMPT, OUTPUT)), position)
    assert draw(raw.clone(), tables_with((settings, PROMPT, OUTPUT)), position) == plain


def test_output_of_an_earlier_attempt_counts_as_output_wherever_the_run_goes_on() -> None:
    tokens = np.concatenate([PROMPT, OUTPUT])
    raw = torch.randn(len(OUTPUT), VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    settings = SETTINGS["all"]
    whole = tables_with((settings, PROMPT, NONE))
    undisturbed = []
    for i in range(len(OUTPUT)):
        logits = raw[i : i + 1].clone()
        draw(logits, whole, len(PROMPT) + i)
        undisturbed.append(logits)
        whole.tokens[0, len(PROMPT) + i] = OUTPUT[i]
    for known in range(1, len(OUTPUT)):
        again = tables_with((settings, PROMPT, OUTPUT[:known]))
        assert again.tokens[0, : len(PROMPT) + known].tolist() == tokens[: -6 + known].tolist()
        logits = raw[known : known + 1].clone()
        draw(logits, again, len(PROMPT) + known)
        assert torch.equal(logits, undisturbed[known])


def test_rows_without_penalties_are_left_alone_also_where_one_had_them_before() -> None:
    penalised, neutral = (SETTINGS["all"], PROMPT, OUTPUT), (Sampling(), PROMPT, OUTPUT)
    tables = tables_with(penalised, neutral)
    raw = torch.randn(2, VOCAB)
    logits = raw.clone()
    draw(logits, tables, 11, 11)
    assert not torch.equal(logits[0], raw[0])
    assert torch.equal(logits[1], raw[1])
    put(tables, neutral)
    assert not tables.penalties
    logits = raw.clone()
    draw(logits, tables, 11, 11)
    assert torch.equal(logits, raw)


def test_a_row_forgets_the_tokens_of_the_run_before() -> None:
    settings = SETTINGS["all"]
    other = np.array([100, 101], np.int32)
    raw = torch.randn(1, VOCAB)
    tables = tables_with((settings, PROMPT, OUTPUT))
    draw(raw.clone(), tables, 11)
    put(tables, (settings, other, other))
    logits = raw.clone()
    draw(logits, tables, 4)
    expected = expected_logits(raw[0].numpy(), other, other, settings)
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-6, atol=1e-6)
