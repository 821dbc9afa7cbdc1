"""The decode attention that benchmarks launch: against float64, and beside the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu_kernels import NAMES
from engine.gpu.attention_plans import new_attention_plans
from engine.gpu.memory import StepLimits
from engine.loader import read_spec
from engine.model.weights import named_shapes
from kernels.new_tokens import NewTokens
from kernels.paged_decode import paged_decode_ref
from ops.bench.kernel_cases import DECODE_CASES, DecodeCase, decode_row
from ops.bench.kernel_inputs import (
    DTYPE,
    QWEN3_06B,
    QWEN3_8B,
    SMOLLM2,
    DecodeSet,
    ModelShape,
    decode_plan_for,
    decode_set,
    engine_tile,
)
from ops.bench.kernel_timing import COPY_TB_S
from ops.bench.shapes import write_shape
from tests.kernels.util import TOLERANCE, relative_error

LENGTHS = [40, 7, 65]
BLOCK_SIZE = 16
TINY = ModelShape("tiny", 64, 64, 6, 2, 16, 1, 512)


def turned(x: torch.Tensor, new: NewTokens, norm: torch.Tensor | None) -> torch.Tensor:
    """Heads [B, H, D] of the last tokens, normed and turned in float64."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + new.eps) * norm.double()
    low, high = x.chunk(2, dim=-1)
    last = [n - 1 for n in LENGTHS]
    cos, sin = (table[last].double()[:, None] for table in (new.cos, new.sin))
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def new_slots(inputs: DecodeSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [B] and places [B] of the new tokens."""
    last = inputs.seq_lens.long() - 1
    return inputs.tables.gather(1, last[:, None] // BLOCK_SIZE)[:, 0].long(), last % BLOCK_SIZE


@pytest.mark.parametrize("head_norms", [False, True])
def test_a_launch_turns_keeps_and_sees_its_new_tokens(head_norms) -> None:
    shape = replace(TINY, head_norms=head_norms)
    inputs = decode_set(LENGTHS, shape, BLOCK_SIZE)
    new = inputs.new_tokens
    assert new is not None
    assert (new.q_norm is not None) == head_norms
    at = new_slots(inputs)
    inputs.k_cache[at] = float("nan")
    inputs.v_cache[at] = torch.finfo(DTYPE).max
    caches = [cache.double() for cache in (inputs.k_cache, inputs.v_cache)]
    heads = inputs.qkv.view(len(LENGTHS), -1, shape.head_dim)
    raw_q, raw_k, raw_v = heads.split([shape.num_q_heads, *[shape.num_kv_heads] * 2], dim=1)
    q, k = turned(raw_q, new, new.q_norm), turned(raw_k, new, new.k_norm)
    caches[0][at], caches[1][at] = k, raw_v.double()
    expected = paged_decode_ref(
        q, *caches, inputs.tables, inputs.rows, inputs.seq_lens, shape.head_dim**-0.5,
        dtype=torch.float64,
    )  # fmt: skip

    plan = decode_plan_for(inputs, engine_tile(shape, len(LENGTHS)))
    for launch in ("first", "again"):
        inputs.out.fill_(float("nan"))
        inputs.run(*plan)
        assert relative_error(inputs.out, expected) < TOLERANCE[DTYPE], launch
    assert relative_error(inputs.k_cache[at], k) < TOLERANCE[DTYPE]
    assert torch.equal(inputs.v_cache[at], raw_v)
    inputs.k_cache[at] = k.to(DTYPE)
    assert torch.equal(inputs.k_cache, caches[0].to(DTYPE)), "another slot was written"
    assert torch.equal(inputs.v_cache, caches[1].to(DTYPE)), "another slot was written"


def test_without_new_tokens_queries_are_taken_as_they_are() -> None:
    inputs = decode_set(LENGTHS, TINY, BLOCK_SIZE, turned_before=True)
    caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    inputs.run(*decode_plan_for(inputs, engine_tile(TINY, len(LENGTHS))))
    expected = paged_decode_ref(
        inputs.q, *caches, inputs.tables, inputs.rows, inputs.seq_lens, TINY.head_dim**-0.5,
        dtype=torch.float64,
    )  # fmt: skip
    assert relative_error(inputs.out, expected) < TOLERANCE[DTYPE]
    for cache, before in zip((inputs.k_cache, inputs.v_cache), caches, strict=True):
        assert torch.equal(cache, before)


@pytest.mark.parametrize(("turned_before", "num_tokens"), [(False, 112 + 3), (True, 112)])
def test_a_line_says_what_is_inside_and_its_floor_counts_it(turned_before, num_tokens) -> None:
    row = decode_row(DecodeCase("tiny", LENGTHS, TINY, turned_before=turned_before))
    note = "queries turned before, no new tokens" if turned_before else "new tokens inside"
    assert (row.name, row.as_dict()["note"]) == ("decode.tiny", note)
    assert row.bytes_moved == num_tokens * 2 * TINY.num_kv_heads * TINY.head_dim * 2
    assert row.floor_us == pytest.approx(row.bytes_moved / COPY_TB_S / 1e6)


def test_results_with_targets_are_of_launches_with_new_tokens() -> None:
    cases = {f"decode.{case.name}": case for case in DECODE_CASES}
    assert len(cases) == len(DECODE_CASES)
    assert not any(cases[name].turned_before for name in NAMES)
    assert all(case.turned_before == ("turned" in name) for name, case in cases.items())


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_06B, SMOLLM2], ids=lambda shape: shape.name)
def test_shapes_and_tiles_are_those_of_the_engine(shape, tmp_path) -> None:
    spec = read_spec(write_shape(shape.name, tmp_path))
    sizes = (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert sizes == (shape.hidden, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    assert any("q_norm" in name for name, _ in named_shapes(spec)) == shape.head_norms
    plans = new_attention_plans(spec, StepLimits(256, 8448, 2048, 64), DTYPE, torch.device("meta"))
    for case in DECODE_CASES:
        if case.shape is shape:
            plan, _ = plans.of(len(case.seq_lens))[0]
            assert plan.tile == case.tile, case.name
