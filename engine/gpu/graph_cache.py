"""Captured steps by size, in one memory pool: made in idle moments, in the order of likely use.

A decode size that is still missing is captured when it comes: the steps that follow need it. A
prompt is not kept waiting for a capture, which takes longer than launching its kernels one by one:
it runs uncaptured, and its size comes first in the next idle moment. Where there is none, a size
that came often is captured in its path, before launching it slowly has cost more than that. A
prompt for which padding would cost more than launching runs uncaptured always.

A step of few rows that has both prompt chunks and decode rows is captured like one of prompts: a
decode row is a chunk of one token. Not in deterministic mode, where a decode row's attention is
always the same. Where launching a step may take the host longer than the device, as that of a small
model does, there are sizes for more rows and longer prompts too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.gpu.buffers import SharedBuffers
from engine.gpu.captured import CaptureSite
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.decoder import GpuDecoder
from engine.gpu.memory import StepLimits
from engine.gpu.prompt_graph import PromptGraph, num_host_ints
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.staging import StepSlots
from engine.gpu.step_costs import StepCosts
from engine.plan import StepPlan

_DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)
_PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
_PROMPT_ROWS = (1, 8)
_LONG_PROMPT_TOKENS = (3072, 4096, 6144)
_MANY_PROMPT_ROWS = (64, 256)
_FEW_ROWS = 8  # decode sizes up to here come before prompts: what a quiet worker needs first
_MIXED_CONTEXT = 2048
"""Tokens of the longest row that decodes in a step captured like one of prompts: one program of
prompt attention goes through all of them."""
_PATIENCE = 24
"""Prompt steps of one size that run uncaptured before one of them pays for the capture (some 110 ms
against 5 more of host time each)."""

Key = tuple[str, int, int, SampleKind]
CapturedPlan = DecodeGraph | PromptGraph


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are captured for; the last is max_num_seqs itself."""
    return (*(size for size in _DECODE_ROWS if size < max_num_seqs), max_num_seqs)


def prompt_sizes(costs: StepCosts, limits: StepLimits) -> dict[int, tuple[int, ...]]:
    """Rows -> tokens that steps with prompt chunks are captured for, both rising; the last rows are
    max_num_seqs, or the most that there are sizes for."""
    budget, most = limits.max_num_batched_tokens, limits.max_num_seqs
    longest = _PROMPT_TOKENS[-1]
    tokens = {size for size in _PROMPT_TOKENS if size <= budget}
    longer = {size for size in (*_LONG_PROMPT_TOKENS, budget) if longest < size <= budget}
    bound = {size for size in tokens | longer if costs.is_launch_bound(size)}
    found = {}
    for rows in sorted({min(rows, most) for rows in (*_PROMPT_ROWS, *_MANY_PROMPT_ROWS)}):
        sizes = bound if rows > _PROMPT_ROWS[-1] else tokens | bound
        found[rows] = tuple(sorted(size for size in sizes if size >= rows))
    return {rows: sizes for rows, sizes in found.items() if sizes}


def num_graphs(costs: StepCosts, limits: StepLimits) -> int:
    """Graphs that idle moments may capture: decode steps of each kind of sampling, and steps with
    prompts without filters and penalties."""
    prompts = sum(map(len, prompt_sizes(costs, limits).values()))
    return len(SampleKind) * len(decode_sizes(limits.max_num_seqs)) + prompts


class GraphCache:
    """The captured step for a plan, if plans of its kind are captured.

    slots: where captured steps read their inputs and all steps leave their results. spare: the same
    for work that is no step.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        tables: RowTables,
        buffers: SharedBuffers,
        limits: StepLimits,
    ) -> None:
        self._costs = decoder.costs
        self._captures_mixed = not decoder.linears.deterministic
        self.prompt_sizes = prompt_sizes(decoder.costs, limits)
        num_inputs = [DecodeGraph.num_host_ints(limits.max_num_seqs)]
        for rows, tokens in self.prompt_sizes.items():
            num_inputs.append(num_host_ints(tokens[-1], rows, limits.block_size))
        device = tables.block_table.device
        self.slots, self.spare = (
            StepSlots(max(num_inputs), limits.max_num_seqs, device) for _ in range(2)
        )
        self._parts = (decoder, tables, buffers, limits.block_size, self.slots)
        self._decode_sizes = decode_sizes(limits.max_num_seqs)
        self._graphs: dict[Key, CapturedPlan] = {}
        self._missed: Counter[Key] = Counter()  # plans that found no graph, by key
        self._site = CaptureSite()

    @property
    def num_captured(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def find(self, plan: StepPlan, kind: SampleKind) -> CapturedPlan | None:
        """The graph that takes this plan; None: it has to be launched kernel by kernel."""
        key = self._key(plan, kind)
        if key is None:
            return None
        graph = self._graphs.get(key)
        if graph is None:
            self._missed[key] += 1
            if key[0] == "prompt" and self._missed[key] < _PATIENCE:
                return None
            graph = self._capture(key)
        return graph if graph.fits(plan) else None

    def capture_one(self) -> bool:
        """Capture the likeliest size that is still missing; False if there is none."""
        key = next((key for key in self._likely() if key not in self._graphs), None)
        if key is not None:
            self._capture(key)
        return key is not None

    def _key(self, plan: StepPlan, kind: SampleKind) -> Key | None:
        num_rows = len(plan.rows)
        if plan.num_decode == num_rows:
            index = bisect_left(self._decode_sizes, num_rows)
            if index == len(self._decode_sizes):
                return None
            return ("decode", self._decode_sizes[index], 0, kind)
        if plan.num_decode and not self._is_small_mix(plan):
            return None
        num_tokens = int(plan.num_new.sum())
        rows = _round_up(self.prompt_sizes, num_rows)
        tokens = None if rows is None else _round_up(self.prompt_sizes[rows], num_tokens)
        if rows is None or tokens is None or not self._costs.padding_pays(num_tokens, tokens):
            return None
        return ("prompt", tokens, rows, kind)

    def _is_small_mix(self, plan: StepPlan) -> bool:
        """Whether its decode rows may be chunks of one token."""
        context = plan.num_computed[: plan.num_decode].max()
        return self._captures_mixed and bool(context < _MIXED_CONTEXT)

    def _likely(self) -> Iterator[Key]:
        """Sizes worth having: those that were missed, then common ones; with filters or penalties
        only if any request used them."""
        yield from (key for key, _ in self._missed.most_common())
        few = [size for size in self._decode_sizes if size <= _FEW_ROWS]
        many = [size for size in self._decode_sizes if size > _FEW_ROWS]
        for kind in sorted({SampleKind.PLAIN, *(key[3] for key in self._missed)}):
            yield from (("decode", size, 0, kind) for size in few)
            yield from (("prompt", size, 1, kind) for size in self.prompt_sizes.get(1, ()))
            yield from (("decode", size, 0, kind) for size in many)
        # Several prompts at once: captured before the first such burst, or the one after it would
        # wait for the capture.
        for rows, sizes in self.prompt_sizes.items():
            yield from (("prompt", size, rows, SampleKind.PLAIN) for size in sizes)

    def _capture(self, key: Key) -> CapturedPlan:
        what, size, rows, kind = key
        make: dict[str, Callable[[], Any]] = {
            "decode": lambda: DecodeGraph(size, kind, *self._parts),
            "prompt": lambda: PromptGraph(size, rows, kind, *self._parts),
        }
        graph: CapturedPlan = make[what]()
        graph.capture(self.spare, self._site)
        self._graphs[key] = graph
        return graph


def _round_up(sizes: Iterable[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)
