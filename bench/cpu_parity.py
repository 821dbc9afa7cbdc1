"""Exactness of the CPU engine on SmolLM2: all prompts of the fixture to their end, in every way.

    python -m bench.cpu_parity [--prompts 32] [--new-tokens 64]

Float32 weights (`quantization=none`) against transformers' greedy tokens: alone, sixteen at once,
in chunks of sixteen tokens, from the prefix cache, and with a KV cache that preempts rows. The test
suite runs a part of this (`tests/integration/test_cpu_parity.py`); all of it takes some ten minutes
on two cores. The last line is JSON; exit code 1 if any token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.build import build_runner
from engine.config import EngineConfig
from engine.plan import Runner
from engine.scheduler import Scheduler
from ops.models import resolve
from tests.cpu_kit import generate, with_limits

_FIXTURE = Path("tests/integration/data/smollm2_greedy.json")
_KV_BYTES = 600 << 20
_TIGHT_BLOCKS = 60  # sixteen rows of these prompts want several times as many

Tokens = list[list[int]]


class Ways:
    """The ways to compute the same prompts."""

    def __init__(self, runner: Runner, prompts: Tokens, new_tokens: int) -> None:
        self._runner = runner
        self._prompts = prompts
        self._new_tokens = new_tokens
        self.preemptions = 0
        self.cached_tokens = 0

    def alone(self) -> Tokens:
        """Each prompt by itself."""
        return [generate(self._runner, [prompt], self._new_tokens)[0] for prompt in self._prompts]

    def sixteen_at_once(self) -> Tokens:
        """As many rows as the runner has by default."""
        return generate(self._runner, self._prompts, self._new_tokens)

    def chunks_of_sixteen(self) -> Tokens:
        """A step computes sixteen tokens at most."""
        narrow = with_limits(self._runner, max_num_batched_tokens=16, chunk_align_tokens=1)
        return generate(narrow, self._prompts, self._new_tokens)

    def from_the_prefix_cache(self) -> Tokens:
        """The second time, with what the first left in the cache."""
        scheduler = Scheduler(self._runner.info)
        cached: list[int] = []
        outputs: Tokens = []
        for prompt in self._prompts:
            for _ in range(2):
                again = generate(self._runner, [prompt], self._new_tokens, None, scheduler, cached)
            outputs += again
        self.cached_tokens = sum(cached)
        return outputs

    def preempted(self) -> Tokens:
        """With so few blocks that rows lose theirs."""
        tight = with_limits(self._runner, num_blocks=_TIGHT_BLOCKS)
        scheduler = Scheduler(tight.info)
        outputs = generate(tight, self._prompts, self._new_tokens, None, scheduler)
        self.preemptions = scheduler.preemptions
        return outputs


def count_equal(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Runs whose tokens are all the expected ones."""
    return sum(list(a) == list(b) for a, b in zip(outputs, expected, strict=True))


def main() -> None:
    """Run every way and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    cases = json.loads(_FIXTURE.read_text(encoding="utf-8"))[: args.prompts]
    expected = [case["tokens"][: args.new_tokens] for case in cases]
    model = str(resolve("smollm2-135m").path)
    config = EngineConfig(
        model_path=model, device="cpu", quantization="none", kv_cache_bytes=_KV_BYTES
    )
    ways = Ways(build_runner(config), [case["prompt"] for case in cases], args.new_tokens)
    results: dict[str, int] = {}
    runs: list[Callable[[], Tokens]] = [
        ways.alone,
        ways.sixteen_at_once,
        ways.chunks_of_sixteen,
        ways.from_the_prefix_cache,
        ways.preempted,
    ]
    for run in runs:
        start = time.perf_counter()
        results[run.__name__] = count_equal(run(), expected)
        seconds = time.perf_counter() - start
        print(
            f"{run.__name__}: {results[run.__name__]}/{len(cases)} in {seconds:.0f} s", flush=True
        )
    line = {
        "bench": "cpu_parity",
        "prompts": len(cases),
        "new_tokens": args.new_tokens,
        "equal": results,
        "preemptions": ways.preemptions,
        "cached_tokens": ways.cached_tokens,
    }
    print(json.dumps(line))
    sys.exit(0 if all(count == len(cases) for count in results.values()) else 1)


if __name__ == "__main__":
    main()
