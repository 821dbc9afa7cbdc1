"""Penalties through the GPU runner: every sampled token by its run's own tokens, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.gpu import decode_graph, packed_step, prompt_graph
from engine.gpu.memory import StepLimits, plan_memory
from engine.gpu.row_tables import SampleKind
from engine.gpu.runner import GpuRunner
from engine.model.errors import MemoryPlanError
from engine.plan import NewRow
from engine.scheduler import Scheduler
from kernels.penalties import penalty_table_bytes
from tests.kernels.gpu_kit import LIMITS, VOCAB, Run, generate_ahead, interpret_graphs, make_runner
from tests.kernels.util import IS_NATIVE

NEW_TOKENS = 6
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (21, 40, 7, 30, 17)]
RUNS = [
    Run(PROMPTS[0], Sampling(repetition_penalty=1.5, presence_penalty=0.5)),
    Run(PROMPTS[1], Sampling(frequency_penalty=-1.0)),
    Run(PROMPTS[2], Sampling(seed=5, temperature=0.9, top_k=40, repetition_penalty=0.5)),
    Run(PROMPTS[3], Sampling()),
    Run(PROMPTS[4], Sampling(presence_penalty=2.0, frequency_penalty=1.0)),
]
"""More runs than rows: one without penalties takes over the row of one with."""


def expected_logits(raw: np.ndarray, prompt: np.ndarray, output: np.ndarray, s: Sampling):
    """Token by token, as the definition reads."""
    logits = raw.astype(np.float64)
    for token in {*prompt.tolist(), *output.tolist()}:
        count = output.tolist().count(token)
        factor = s.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= s.frequency_penalty * count
        logits[token] -= s.presence_penalty * (count > 0)
    return logits


@dataclass
class Witness:
    """Checks every call of `sample_rows` against the token table, and notes what was done.

    Replays of a graph on a GPU call nothing: there, that continued runs give the same tokens shows
    that what graphs count is what the token table says.
    """

    runs: dict[int, NewRow] = field(default_factory=dict)
    kinds: list[SampleKind] = field(default_factory=list)
    num_checked: int = 0

    def take_over(self, original: Callable[..., None]) -> Callable[..., None]:
        def wrapper(new_rows: Any) -> None:
            self.runs.update((new.row, new) for new in new_rows)
            original(new_rows)

        return wrapper

    def sample_rows(self, original: Callable[..., None]) -> Callable[..., None]:
        def wrapper(kind, logits, rows, positions, tables, buffers, **options) -> None:
            raw = logits.clone()
            original(kind, logits, rows, positions, tables, buffers, **options)
            self.kinds.append(kind)
            if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
                self._check(raw, logits, rows, positions, tables)

        return wrapper

    def _check(self, raw, logits, rows, positions, tables) -> None:
        for entry, (row, position) in enumerate(
            zip(rows.tolist(), positions.tolist(), strict=True)
        ):
            if row < 0:
                assert torch.equal(logits[entry].view(torch.int32), raw[entry].view(torch.int32))
                continue
            run, tokens = self.runs[row], tables.token_table[row, :position].cpu().numpy()
            prompt, output = np.split(tokens, [run.num_prompt_tokens])
            expected = expected_logits(raw[entry].cpu().numpy(), prompt, output, run.sampling)
            actual = logits[entry].cpu().numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
            self.num_checked += run.sampling.has_penalties


def watch(runner: GpuRunner, patch: pytest.MonkeyPatch) -> Witness:
    """Put a witness beside everything that this runner samples, until the patch is undone."""
    witness, tables = Witness(), runner._tables
    patch.setattr(tables, "take_over", witness.take_over(tables.take_over))
    for module in (decode_graph, packed_step, prompt_graph):
        patch.setattr(module, "sample_rows", witness.sample_rows(module.sample_rows))
    return witness


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_graphs(patch)
        yield tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def runner(model: Path) -> GpuRunner:
    return make_runner(model)


@pytest.fixture(scope="module")
def undisturbed(runner: GpuRunner) -> tuple[list[list[int]], Witness]:
    """Tokens of all runs, and who saw them sampled."""
    with pytest.MonkeyPatch.context() as patch:
        witness = watch(runner, patch)
        return generate_ahead(runner, RUNS, NEW_TOKENS), witness


def test_each_row_is_penalised_by_its_own_tokens_while_rows_change_hands(
    undisturbed: tuple[list[list[int]], Witness],
) -> None:
    outputs, witness = undisturbed
    assert witness.num_checked >= (1 if IS_NATIVE else 4 * NEW_TOKENS)
    assert len(set(outputs[4])) == NEW_TOKENS, "a token came twice at a frequency penalty"
    assert SampleKind.PENALISED in witness.kinds


def test_a_run_alone_gives_the_tokens_it_gives_beside_others(
    runner: GpuRunner, undisturbed: tuple[list[list[int]], Witness]
) -> None:
    for i in (2, 3):
        assert generate_ahead(runner, [RUNS[i]], NEW_TOKENS) == [undisturbed[0][i]]


def test_continued_runs_give_the_tokens_of_undisturbed_ones(
    runner: GpuRunner, undisturbed: tuple[list[list[int]], Witness]
) -> None:
    again = [
        Run(run.prompt, run.sampling, tokens[:known])
        for known, (run, tokens) in enumerate(zip(RUNS, undisturbed[0], strict=True), start=1)
    ]
    assert generate_ahead(runner, again, NEW_TOKENS) == undisturbed[0]


def test_preempted_runs_give_the_tokens_of_undisturbed_ones(
    model: Path, undisturbed: tuple[list[list[int]], Witness]
) -> None:
    tight = make_runner(model, num_blocks=4)
    scheduler = Scheduler(tight.info)
    assert generate_ahead(tight, RUNS, NEW_TOKENS, scheduler) == undisturbed[0]
    assert scheduler.preemptions > 0


def test_without_penalties_no_step_counts_and_no_graph_for_them_is_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model)
    witness = watch(runner, monkeypatch)
    runner._tables.penalties.counts.fill_(-999)
    runs = [Run(prompt, Sampling(top_k=5, temperature=0.5)) for prompt in PROMPTS[:2]]
    generate_ahead(runner, [*runs, Run(PROMPTS[2], Sampling())], 3)
    assert set(witness.kinds) <= {SampleKind.PLAIN, SampleKind.FILTERED}
    assert SampleKind.PENALISED not in {key[3] for key in runner._graphs._graphs}
    assert (runner._tables.penalties.counts == -999).all()


def test_warming_up_touches_no_count(model: Path) -> None:
    runner = make_runner(model)
    runner._tables.penalties.counts.fill_(-999)
    assert runner.prepare()
    assert (runner._tables.penalties.counts == -999).all()


def test_the_tables_are_in_the_memory_plan_and_refused_with_numbers(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, free_bytes = runner._packed._decoder.spec, 2 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, free_bytes))

    def planned(limits: StepLimits, kv_cache_bytes: int = 0, deterministic: bool = False):
        return plan_memory(
            spec, limits, element_bytes=2, weight_bytes=0, kv_cache_bytes=kv_cache_bytes,
            utilization=1.0, num_graphs=0, deterministic=deterministic, device=torch.device("cpu"),
        )  # fmt: skip

    plan = planned(LIMITS)
    assert plan.penalty_bytes == penalty_table_bytes(LIMITS.max_num_seqs, spec.vocab_size)
    assert "penalties_gib" in plan.in_gib()
    saved = plan.activation_bytes - planned(LIMITS, deterministic=True).activation_bytes
    assert saved == 2 * spec.intermediate_size * LIMITS.max_num_batched_tokens * 2
    rows = (free_bytes - (800 << 20)) // (4 * spec.vocab_size)
    with pytest.raises(MemoryPlanError) as caught:
        planned(StepLimits(rows, 64, 128, 16))
    assert caught.value.available_bytes < caught.value.needed_bytes
    assert "max_num_seqs" in str(caught.value)
