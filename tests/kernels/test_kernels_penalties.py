"""Penalties against their references: what is read, what is written, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.penalties import (
    PenaltyTables,
    count_new_rows,
    count_new_rows_ref,
    count_sampled,
    new_penalty_tables,
    penalise,
    penalise_ref,
    penalty_table_bytes,
)
from tests.kernels.test_kernels_paged_decode import ints
from tests.kernels.util import DEVICE, DTYPES, IS_NATIVE, randn

NUM_ROWS, MAX_LEN = 7, 2500
NEUTRAL_ROW = 3
VOCABS = [5, 2048, 4613]


def tables_for(vocab_size: int) -> PenaltyTables:
    """Every row with other penalties, one without any; counts that nobody may take for real."""
    tables = new_penalty_tables(NUM_ROWS, vocab_size, torch.device(DEVICE))
    tables.repetition.copy_(torch.tensor([1.3, 1.0, 0.7, 1.0, 1.0, 2.0, 1.1]))
    tables.presence.copy_(torch.tensor([0.0, 1.5, 0.0, 0.0, 0.0, -0.5, 0.3]))
    tables.frequency.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, -1.25, 0.9, 0.1]))
    tables.counts.fill_(-999)
    return tables


def token_table(vocab_size: int) -> torch.Tensor:
    """Tokens of all rows; a quarter of them is one token, so that many programs meet at it."""
    generator = torch.Generator().manual_seed(vocab_size)
    tokens = torch.randint(0, vocab_size, (NUM_ROWS, MAX_LEN), generator=generator)
    tokens[:, ::4] = vocab_size - 1
    return tokens.int().to(DEVICE)


def counted(vocab_size: int) -> tuple[PenaltyTables, torch.Tensor]:
    """Tables in which all rows are counted, and the tokens."""
    tables, tokens = tables_for(vocab_size), token_table(vocab_size)
    runs = ints([[*range(NUM_ROWS)], [20, 4, 1, 15, 700, 16, 6], [40, 9, 1, 30, 1500, 33, 12]])
    count_new_rows_ref(tables, tokens, runs)
    return tables, tokens


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_of_new_rows_are_counted_and_other_rows_keep_their_counts(vocab_size: int) -> None:
    tables, expected = tables_for(vocab_size), tables_for(vocab_size)
    tokens = token_table(vocab_size)
    runs = ints([[6, 0, -1, 2, 5], [7, 1024, 3, 1, 1], [7, 2311, 9, 1, 2049]])
    count_new_rows(tables, tokens, runs, 2311)
    count_new_rows_ref(expected, tokens, runs)
    assert torch.equal(tables.counts, expected.counts)
    assert (tables.counts[[1, 3, 4]] == -999).all()
    in_output = tokens[0, 1024:2311].tolist()
    is_in_prompt = vocab_size - 1 in tokens[0, :1024].tolist()
    last = int(tables.counts[0, vocab_size - 1])
    assert last == 2 * in_output.count(vocab_size - 1) + is_in_prompt


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_penalised_logits_equal_the_reference_to_the_last_bit(
    dtype: torch.dtype, vocab_size: int
) -> None:
    tables, _ = counted(vocab_size)
    rows = ints([4, 0, -1, 5, 3, 2, 1, 6])
    padded = torch.full((len(rows), vocab_size + 3), float("nan"), dtype=dtype, device=DEVICE)
    logits = padded[:, :vocab_size]
    logits.copy_((randn(len(rows), vocab_size) * 6).to(dtype))
    before = logits.clone()
    expected = penalise_ref(before, rows, tables)
    penalise(logits, rows, tables)
    assert torch.equal(logits, expected)
    assert padded[:, vocab_size:].isnan().all(), "written past the row"
    untouched = [2, 4]  # padding, and the row without penalties
    assert torch.equal(logits[untouched], before[untouched])
    for entry in (0, 1, 3, 5, 6, 7):
        assert not torch.equal(logits[entry], before[entry])
        unseen = tables.counts[rows[entry]] == 0
        assert torch.equal(logits[entry][unseen], before[entry][unseen])


def test_broken_logits_stay_broken_for_the_sampler_to_see() -> None:
    tables, _ = counted(64)
    tables.counts.fill_(3)
    logits = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0] * 16], device=DEVICE)
    penalise(logits, ints([0]), tables)
    assert logits[0, 0].isnan()
    assert logits[0, 1] == float("inf")
    assert logits[0, 2] == float("-inf")
    assert logits[0, 3].isfinite()


def test_sampled_tokens_are_counted_once_for_their_rows_alone() -> None:
    tables, _ = counted(300)
    before = tables.counts.clone()
    rows = ints([5, -1, NEUTRAL_ROW, 0, 6])
    count_sampled(tables, ints([299, -7, 4, 0, 17]), rows)
    before[5, 299] += 2
    before[0, 0] += 2
    before[6, 17] += 2
    assert torch.equal(tables.counts, before)


def test_more_rows_than_a_program_holds_are_all_counted() -> None:
    tables = new_penalty_tables(300, 9, torch.device(DEVICE))
    tables.presence.fill_(1.0)
    count_sampled(tables, (torch.arange(300) % 9).int().to(DEVICE), ints(list(range(300))))
    assert tables.counts.sum(dim=1).tolist() == [2] * 300
    assert (tables.counts.argmax(dim=1).cpu() == torch.arange(300) % 9).all()


def test_counting_step_by_step_equals_counting_a_continued_run_at_once() -> None:
    tables, tokens = counted(4613)
    rows = ints([5, 1])
    count_new_rows(tables, tokens, ints([[5, 1], [16, 4], [16, 4]]), 16)
    for step in range(6):
        count_sampled(tables, torch.stack([tokens[5, 16 + step], tokens[1, 4 + step]]), rows)
    again, _ = counted(4613)
    count_new_rows(again, tokens, ints([[5, 1], [16, 4], [22, 10]]), 22)
    assert torch.equal(tables.counts[[5, 1]], again.counts[[5, 1]])


def test_the_stated_size_is_what_the_tables_take() -> None:
    tables = new_penalty_tables(3, 100, torch.device(DEVICE))
    parts = (tables.repetition, tables.presence, tables.frequency, tables.counts)
    assert sum(part.nbytes for part in parts) == penalty_table_bytes(3, 100)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_NATIVE, reason="needs a CUDA device")
def test_penalties_replay_in_a_graph_without_allocating() -> None:
    """Qwen3's vocabulary, 256 rows: each replay sees what the replays before it counted."""
    vocab_size, num_rows = 151_936, 256
    tables = new_penalty_tables(num_rows, vocab_size, torch.device(DEVICE))
    tables.repetition.fill_(1.2)
    tables.frequency.fill_(0.5)
    raw = randn(num_rows, vocab_size) * 5
    logits, tokens = raw.clone(), torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    rows = ints(list(reversed(range(num_rows))))

    def step() -> None:
        logits.copy_(raw)
        penalise(logits, rows, tables)
        count_sampled(tables, tokens, rows)

    _replay_and_compare(step, tables, raw, logits, tokens, rows)


def _replay_and_compare(
    step: Callable[[], None],
    tables: PenaltyTables,
    raw: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    tables.counts.zero_()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for token in (7, 151_935, 7, 7):
        tokens.fill_(token)
        graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert (tables.counts[:, 7] == 6).all()
    tables.counts[:, 7] -= 2  # as the last replay found them
    assert torch.equal(logits, penalise_ref(raw, rows, tables))
