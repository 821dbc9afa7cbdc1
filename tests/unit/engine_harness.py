"""Drives a scheduler and a strict fake runner without a loop or a link, as the loop would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from broker.ring.records import Finish, Reject, Sampling, Submit
from engine.config import EngineConfig, FakeModel
from engine.fake_runner import FakeRunner, build_fake_runner, expected_tokens
from engine.outcome import Outcome
from engine.scheduler import Scheduler

VOCAB = 97


def make_runner(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_rows: int = 4,
    budget: int = 16,
    max_len: int = 128,
    is_async: bool = False,
    **fake: Any,
) -> FakeRunner:
    """A verifying fake runner of small sizes."""
    model = FakeModel(
        vocab_size=VOCAB, max_model_len=max_len, num_blocks=num_blocks, is_async=is_async, **fake
    )
    config = EngineConfig(
        fake=model,
        max_num_seqs=num_rows,
        max_num_batched_tokens=budget,
        block_size_tokens=block_size,
    )
    return build_fake_runner(config, verify=True)


def make_submit(rid: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> Submit:
    """A run with plain defaults."""
    stop = fields.pop("stop", [])
    prefix = fields.pop("prefix", [])
    return Submit(
        rid=rid,
        prompt_ids=np.array(prompt, np.int32),
        prefix_ids=np.array(prefix, np.int32),
        stop_token_ids=np.array(stop, np.int32),
        max_tokens=max_tokens,
        **fields,  # type: ignore[arg-type]
    )


def undisturbed(submit: Submit) -> list[int]:
    """The output of a run alone, to its max_tokens or first stop id."""
    prompt = submit.prompt_ids.tolist()
    tokens = expected_tokens(prompt, submit.max_tokens, VOCAB, submit.sampling)
    for i, token in enumerate(tokens):
        if token in submit.stop_token_ids and i >= submit.min_tokens:
            return tokens[: i + 1]
    return tokens


@dataclass
class Harness:
    """One scheduler, one runner, and what came out by run."""

    runner: FakeRunner
    enable_prefix_cache: bool = True
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, Finish] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.runner.info, self.enable_prefix_cache)

    def submit(self, rid: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> Submit:
        """Submit a run that must be accepted."""
        submit = make_submit(rid, prompt, max_tokens, **fields)
        reject = self.scheduler.submit(submit)
        assert reject is None, reject
        return submit

    def reject(self, submit: Submit) -> Reject:
        """Submit a run that must be refused."""
        reject = self.scheduler.submit(submit)
        assert reject is not None
        return reject

    def step(self) -> bool:
        """One pass of the loop's order; False if nothing happened."""
        scheduler, runner = self.scheduler, self.runner
        plan = scheduler.plan()
        if plan is not None:
            room = scheduler.rows.capacity[plan.rows]
            assert (plan.num_computed + plan.num_new <= room).all(), "a row computes without KV"
            runner.launch(plan)
            scheduler.launched()
        outcome = None
        if scheduler.num_in_flight > (1 if plan is not None and runner.is_async else 0):
            outcome = scheduler.complete(runner.collect())
            self.num_steps += 1
        self._take_ends()
        if outcome is not None:
            self._take(outcome)
        scheduler.check_integrity()
        return plan is not None or outcome is not None

    def run(self, until: Callable[[], bool] | None = None, max_steps: int = 3000) -> None:
        """Step until nothing happens any more, or `until` holds."""
        for _ in range(max_steps):
            if until is not None and until():
                return
            if not self.step():
                assert until is None, "came to rest before the condition held"
                return
        raise AssertionError(f"no rest after {max_steps} steps")

    def assert_at_rest(self) -> None:
        """No row, no block, no step is held by anybody."""
        scheduler = self.scheduler
        assert scheduler.num_in_flight == 0
        assert scheduler.num_running == 0
        assert scheduler.num_waiting == 0
        assert scheduler.blocks.num_used == 0
        assert scheduler.rows.num_free == scheduler.rows.num_rows

    def _take_ends(self) -> None:
        for rid, finish in self.scheduler.take_ends():
            self._end(rid, finish)

    def _take(self, outcome: Outcome) -> None:
        for rid, cached in zip(
            outcome.started_rids.tolist(), outcome.cached_tokens.tolist(), strict=True
        ):
            assert rid not in self.cached, f"run {rid} started twice"
            self.cached[rid] = cached
        for rid, token, finish in zip(
            outcome.rids.tolist(), outcome.token_ids.tolist(), outcome.finish.tolist(), strict=True
        ):
            assert rid not in self.finish, f"run {rid} gave a token after its end"
            assert rid in self.cached, f"run {rid} gave a token before it started"
            if token >= 0:
                self.tokens[rid].append(token)
            if finish:
                self._end(rid, Finish(finish))

    def _end(self, rid: int, finish: Finish) -> None:
        assert rid not in self.finish, f"run {rid} ended twice"
        self.finish[rid] = finish


def sampled(seed: int) -> Sampling:
    """Sampling parameters of a run that is not greedy."""
    return Sampling(seed=seed, temperature=0.8)
