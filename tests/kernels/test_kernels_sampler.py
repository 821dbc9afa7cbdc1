"""The sampler against its reference, and its guarantees: ties, batch rows, padding, broken
logits."""

from __future__ import annotations

import pytest
import torch

from kernels.sampler import new_sampler_workspace, sample, sample_ref
from kernels.sampler_candidates import PART_CAPACITY
from kernels.sampling_tables import new_sampling_tables
from tests.kernels.test_kernels_paged_decode import ints
from tests.kernels.util import DEVICE, DTYPES, IS_NATIVE, poisoned, randn

VOCAB = 2311
NUM_ROWS = 12
ROWS = [3, 7, 0, 11, -1, 5, 2, 9, 1, 4, 6, 8]


def run(logits, rows, positions, params, has_filters):
    entries, vocab_size = logits.shape
    workspace = new_sampler_workspace(entries, vocab_size, torch.device(DEVICE))
    workspace.partials.fill_(float("nan"))
    out = torch.full((entries,), -7, dtype=torch.int32, device=DEVICE)
    bad = torch.full((entries,), -7, dtype=torch.int8, device=DEVICE)
    logprobs = poisoned(entries)
    table = torch.full((NUM_ROWS, 64), -7, dtype=torch.int32, device=DEVICE)
    sample(out, bad, logits, rows, positions, params, table, workspace, has_filters, logprobs)
    assert not workspace.arrivals.any()
    return out, bad, logprobs, table


def mixed_params():
    """One kind of request per row: greedy, plain, each filter alone, and together."""
    params = new_sampling_tables(NUM_ROWS, torch.device(DEVICE))
    params.temperature.copy_(torch.tensor([0, 1, 0.7, 1.5, 1, 1, 2, 1, 1, 0, 1e-8, 1]))
    params.top_k.copy_(ints([0, 0, 5, 0, 0, 50, 7, 1, 5000, 3, 2, 2000]))
    params.top_p.copy_(torch.tensor([1, 1, 1, 0.9, 1, 0.8, 0.61, 1, 1, 0.5, 0.1, 0.0]))
    params.min_p.copy_(torch.tensor([0, 0, 0, 0, 0.05, 0, 0.02, 0, 0, 0, 0, 0]))
    params.seed.copy_(torch.arange(NUM_ROWS) * 7919 - 4)
    return params


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_filters", [False, True])
def test_tokens_equal_the_reference(dtype, has_filters) -> None:
    params = mixed_params()
    if not has_filters:
        params.top_k.zero_()
        params.top_p.fill_(1.0)
        params.min_p.zero_()
    rows = ints(ROWS)
    for trial in range(2 if IS_NATIVE else 1):
        logits = (randn(len(ROWS), VOCAB, seed=trial) * 4).to(dtype)
        positions = ints([(5 * i + trial) % 64 for i in range(len(ROWS))])
        out, bad, logprobs, table = run(logits, rows, positions, params, has_filters)
        expected, expected_logprobs = sample_ref(logits, rows, positions, params)
        live = [i for i, row in enumerate(ROWS) if row >= 0]
        assert out[live].tolist() == expected[live].tolist()
        assert not bad[live].any()
        torch.testing.assert_close(logprobs[live], expected_logprobs[live], rtol=1e-4, atol=1e-4)
        for i in live:
            assert int(table[ROWS[i], positions[i]]) == int(out[i])
        assert int((table != -7).sum()) == len(live), "padding or another cell was written"
        assert int(out[4]) == -7


def test_the_search_among_candidates_equals_the_reference() -> None:
    """Peaked logits over nine parts of the vocabulary: no part overflows, so no row is read
    whole."""
    vocab_size, entries = 9000, 5
    params = new_sampling_tables(NUM_ROWS, torch.device(DEVICE))
    params.temperature.fill_(0.9)
    params.seed.copy_(torch.arange(NUM_ROWS))
    params.top_k[:entries] = ints([5, 0, 8, 9, 3])
    params.top_p[:entries] = torch.tensor([1.0, 0.6, 0.7, 1.0, 0.0])
    params.min_p[3] = 0.05
    logits = (randn(entries, vocab_size, seed=3) * 6).half()
    rows = ints(list(range(entries)))
    workspace = new_sampler_workspace(entries, vocab_size, torch.device(DEVICE))
    for buffer in (workspace.filters.values, workspace.filters.maxima, workspace.filters.bounds):
        buffer.fill_(float("nan"))
    out = torch.zeros(entries, dtype=torch.int32, device=DEVICE)
    bad = torch.zeros(entries, dtype=torch.int8, device=DEVICE)
    table = torch.zeros(NUM_ROWS, 64, dtype=torch.int32, device=DEVICE)
    for position in range(3):
        positions = ints([position] * entries)
        sample(out, bad, logits, rows, positions, params, table, workspace, True)
        assert int(workspace.filters.counts.max()) <= PART_CAPACITY
        expected, _ = sample_ref(logits, rows, positions, params)
        assert out.tolist() == expected.tolist()


def test_filters_keep_the_lower_ids_of_a_tie() -> None:
    """All logits equal: top_k 3 leaves ids 0, 1, 2; top_p of 2.5 / V leaves the same."""
    vocab_size = 300
    params = new_sampling_tables(NUM_ROWS, torch.device(DEVICE))
    params.temperature.fill_(1.0)
    params.seed.copy_(torch.arange(NUM_ROWS))
    params.top_k[0] = 3
    params.top_p[1] = 2.5 / vocab_size
    params.top_k[2] = 50
    params.top_p[2] = 2.5 / 50
    seen = set()
    logits = torch.full((3, vocab_size), 0.25, device=DEVICE)
    for position in range(4):
        out, *_ = run(logits, ints([0, 1, 2]), ints([position] * 3), params, True)
        seen.update(out.tolist())
        assert out.max() <= 2
    assert seen == {0, 1, 2}


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    params = mixed_params()
    logits = randn(len(ROWS), VOCAB) * 3
    rows, positions = ints(ROWS), ints([9] * len(ROWS))
    together, *_ = run(logits, rows, positions, params, True)
    for entry in (0, 3, 6):
        alone, *_ = run(
            logits[entry : entry + 1], rows[entry : entry + 1], positions[:1], params, True
        )
        assert int(alone[0]) == int(together[entry])


def test_broken_logits_are_flagged_for_their_row_alone() -> None:
    params = mixed_params()
    logits = randn(5, VOCAB) * 3
    logits[0, 17] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    logits[3, :] = float("-inf")
    logits[3, 1234] = -2.0
    rows, positions = ints([1, 2, 0, 5, 7]), ints([1, 2, 3, 4, 5])
    out, bad, *_ = run(logits, rows, positions, params, True)
    assert bad.tolist() == [1, 1, 1, 0, 0]
    assert int(out[3]) == 1234
    assert int(out[4]) == int(logits[4].argmax())


def test_stop_ids_are_held_back_below_the_minimum_position() -> None:
    params = new_sampling_tables(NUM_ROWS, torch.device(DEVICE))
    params.min_position[:2] = 10
    params.stop_ids[:2, :2] = ints([100, 200])
    logits = randn(2, VOCAB)
    logits[:, 100] = 50.0
    logits[:, 200] = 60.0
    logits[:, 300] = 40.0
    out, *_ = run(logits, ints([0, 1]), ints([9, 10]), params, False)
    assert out.tolist() == [300, 200]


def test_sampled_frequencies_follow_the_probabilities() -> None:
    """Chi-square of 4 cells over 400 draws; above 16.3 one time in a thousand, and the draws are
    fixed."""
    params = new_sampling_tables(1, torch.device(DEVICE))
    params.temperature.fill_(1.0)
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = probabilities.log().to(DEVICE).expand(50, 4).contiguous()
    counts = torch.zeros(4)
    workspace = new_sampler_workspace(50, 4, torch.device(DEVICE))
    out = torch.zeros(50, dtype=torch.int32, device=DEVICE)
    bad = torch.zeros(50, dtype=torch.int8, device=DEVICE)
    table = torch.zeros(1, 400, dtype=torch.int32, device=DEVICE)
    rows = ints([0] * 50)
    for first in range(0, 400, 50):
        positions = torch.arange(first, first + 50, dtype=torch.int32, device=DEVICE)
        sample(out, bad, logits, rows, positions, params, table, workspace, False)
        counts += torch.bincount(out.long().cpu(), minlength=4)
    expected = 400 * probabilities
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3
