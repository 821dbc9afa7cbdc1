"""Steps of decode rows and prompt chunks at once: who turns queries and keys, and that all tokens
see what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.gpu import decoder as decoder_module
from engine.plan import NewRow, StepPlan
from tests.kernels.test_gpu_decoder import FAMILIES, NONE, PLAIN, Fixture

ATOL = 1e-4


def step(f: Fixture, blocks, rows, computed, new, num_decode) -> torch.Tensor:
    """Run a step in which all rows sample; returns their logits."""
    columns = zip(*blocks, strict=True) if blocks else ([], [], [])
    numbers = (np.array(column, np.int32) for column in (*columns, rows, computed, new))
    plan = StepPlan(1, (), *numbers, np.ones(len(rows), np.bool_), num_decode)
    f.packed.run(plan, PLAIN)
    return f.buffers.head.logits[: len(rows)].cpu()


@pytest.mark.parametrize(
    ("family", "products"),
    [*((family, {}) for family in FAMILIES), ("qwen3", {"deterministic": True})],
    ids=str,
)
def test_a_mixed_step_turns_every_query_once_and_gives_the_reference_logits(
    tmp_path, monkeypatch, family: str, products: dict[str, bool]
) -> None:
    """Then a decode step reads what it has kept."""
    ropes = []
    rope = decoder_module.rope_kv_write

    def noted(*args, **options):
        ropes.append(options["with_queries"])
        rope(*args, **options)

    monkeypatch.setattr(decoder_module, "rope_kv_write", noted)
    f = Fixture(tmp_path, FAMILIES[family], **products)
    turns_before = bool(products)
    rng = np.random.default_rng(7)
    a, b, c = (rng.integers(0, 131, n).astype(np.int32) for n in (21, 7, 33))
    for row, ids in ((3, a), (0, b), (1, c)):
        f.tables.take_over([NewRow(row, ids, len(ids), Sampling(), NONE, 0)])
    # the first 20 tokens of a and 6 of b; then one token of either beside all of c
    step(f, [(3, 0, 5), (3, 1, 9), (0, 0, 2)], [3, 0], [0, 0], [20, 6], 0)
    f.tables.token_table[3, 20], f.tables.token_table[0, 6] = int(a[20]), int(b[6])  # sampled over
    ropes.clear()
    logits = step(f, [(1, n, 12 + n) for n in range(3)], [0, 3, 1], [6, 20, 0], [1, 1, 33], 2)
    assert ropes == [turns_before] * f.spec.num_layers
    for row_logits, ids in zip(logits, (b, a, c), strict=True):
        torch.testing.assert_close(row_logits, f.expected(ids), rtol=0, atol=ATOL)
    rows = (b, a, c)
    grown = [np.append(ids, int(z.argmax())) for ids, z in zip(rows, logits, strict=True)]
    ropes.clear()
    logits = step(f, [(1, 2, 14)], [0, 3, 1], [7, 21, 33], [1, 1, 1], 3)
    # The last layer's keys and values are kept apart.
    assert ropes == [True] * f.spec.num_layers if turns_before else [False]
    for row_logits, ids in zip(logits, grown, strict=True):
        torch.testing.assert_close(row_logits, f.expected(ids), rtol=0, atol=ATOL)
