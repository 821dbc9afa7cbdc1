"""Steps of decode rows and prompt chunks at once: who turns queries and keys, and that all tokens
see what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.gpu import decoder as decoder_module
from engine.gpu.prompt_graph import PromptGraph
from engine.plan import NewRow, StepPlan
from tests.kernels.test_gpu_decoder import FAMILIES, LIMITS, NONE, PLAIN, Fixture

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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_mixed_step_takes_decode_rows_as_chunks_of_one_token(
    tmp_path, family: str
) -> None:
    """The prompts' captured step, with padding; then a decode step reads what it has kept."""
    f = Fixture(tmp_path, FAMILIES[family])
    rng = np.random.default_rng(8)
    a, b = (rng.integers(0, 131, n).astype(np.int32) for n in (21, 26))
    for row, ids in ((3, a), (1, b)):
        f.tables.take_over([NewRow(row, ids, len(ids), Sampling(), NONE, 0)])
    step(f, [(3, 0, 5), (3, 1, 9)], [3], [0], [20], 0)
    f.tables.token_table[3, 20] = int(a[20])  # sampled over
    graph = PromptGraph(48, 4, PLAIN, f.decoder, f.tables, f.buffers, LIMITS.block_size, f.slots)
    plan = StepPlan(
        2, (), *(np.array(column, np.int32) for column in ([1, 1], [0, 1], [4, 7])),
        *(np.array(column, np.int32) for column in ([3, 1], [20, 0], [1, 26])),
        np.ones(2, np.bool_), 1,
    )  # fmt: skip
    f.run_captured(graph, plan)
    logits = f.buffers.head.logits[:2].cpu()
    for row_logits, ids in zip(logits, (a, b), strict=True):
        torch.testing.assert_close(row_logits, f.expected(ids), rtol=0, atol=ATOL)
    grown = [np.append(ids, int(z.argmax())) for ids, z in zip((a, b), logits, strict=True)]
    logits = step(f, [], [3, 1], [21, 26], [1, 1], 2)
    for row_logits, ids in zip(logits, grown, strict=True):
        torch.testing.assert_close(row_logits, f.expected(ids), rtol=0, atol=ATOL)
