"""Steps of padding that between them launch every kernel variant of steps with prompt chunks.

A kernel is compiled anew for some numbers of decode rows (its block holds them), of sampled rows
(the sampler's parts, the tile of the head's product), of tokens (tiles of the other products), and
for each kind of sampling. Each of these has its kernels to itself, so one step for each value will
do, in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
import torch

from engine.gpu.linear import Linears
from engine.gpu.memory import StepLimits
from engine.gpu.row_tables import SampleKind
from engine.model.spec import ModelSpec
from engine.plan import StepPlan
from kernels.fixed_tiles import FEW_ROWS, fixed_gemm_tile

_TILE_ROWS = 64
"""Tiles of products, and whose product it is, change at multiples of it, and below it at 16."""


def padding_steps(
    spec: ModelSpec, dtype: torch.dtype, linears: Linears, limits: StepLimits
) -> Iterator[tuple[SampleKind, StepPlan]]:
    """The steps, likely ones first. dtype: of the weights."""
    most = limits.max_num_seqs
    tokens = _token_counts(spec, dtype, linears, max(limits.max_num_batched_tokens, most))
    rows = _row_counts(spec, dtype, linears, most)
    yield SampleKind.PLAIN, padding_plan(0, tokens[0])
    for count in rows:
        # With one row and with all of them: the sampler cuts few rows and many differently.
        for kind in SampleKind if count in (1, most) else (SampleKind.PLAIN,):
            yield kind, padding_plan(count, int(count < most))
    for count in tokens[1:]:
        yield SampleKind.PLAIN, padding_plan(0, count)


def padding_plan(num_decode: int, chunk: int) -> StepPlan:
    """Decode rows, and a prompt chunk of so many tokens (0: none), that belong to nobody; the
    decode rows sample, or the chunk where it is alone."""
    num_new = np.array([1] * num_decode + [chunk] * (chunk > 0), np.int32)
    nobody, zeros = np.full(len(num_new), -1, np.int32), np.zeros(len(num_new), np.int32)
    sample = np.arange(len(num_new)) < max(num_decode, 1)
    return StepPlan(
        0, (), nobody[:1], zeros[:1], zeros[:1], nobody, zeros, num_new, sample, num_decode
    )


def _row_counts(spec: ModelSpec, dtype: torch.dtype, linears: Linears, most: int) -> list[int]:
    """Numbers of decode rows, all of which sample; rising, the last one is `most`."""
    powers = [1 << power for power in range(most.bit_length())]

    def head(rows: int) -> Iterator[Hashable]:
        if linears.deterministic:
            yield fixed_gemm_tile(rows, spec.vocab_size, spec.hidden_size, dtype)

    return sorted({*powers, *_changes(head, most), most})


def _token_counts(spec: ModelSpec, dtype: torch.dtype, linears: Linears, most: int) -> list[int]:
    """Numbers of tokens with all tiles that the layers' products take for any number; rising."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes = [(spec.qkv_size, hidden), (hidden, spec.q_size), (hidden, inner)]
    shapes.append((2 * spec.kv_size, hidden))
    gate_up = torch.empty(2 * inner, hidden, dtype=dtype, device="meta")

    def products(tokens: int) -> Iterator[Hashable]:
        yield "any"  # one number of tokens at least
        yield from (("parts", n, linears.norm_parts(tokens, n, k)) for n, k in shapes)
        if linears.deterministic:
            # Up to FEW_ROWS a product asks for its weights ahead, by whatever tile.
            few = tokens <= FEW_ROWS
            yield from ((n, k, few, fixed_gemm_tile(tokens, n, k, dtype)) for n, k in shapes)
        if linears.glu_is_ours(tokens, gate_up):
            yield fixed_gemm_tile(tokens, inner, hidden, dtype, glu=True)

    return _changes(products, most)


def _changes(values_at: Callable[[int], Iterator[Hashable]], most: int) -> list[int]:
    """Those of 16, the multiples of _TILE_ROWS below `most`, and `most`, that have a value which no
    smaller one has."""
    seen: set[Hashable] = set()
    found = []
    for count in sorted({min(16, most), *range(_TILE_ROWS, most, _TILE_ROWS), most}):
        values = set(values_at(count))
        if values - seen:
            found.append(count)
        seen |= values
    return found
