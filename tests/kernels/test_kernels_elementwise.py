"""Norm, activation, rotary embedding with KV write, embedding gather and input expansion."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul, silu_mul_ref
from kernels.deferred_norm import NextNorm, new_squares
from kernels.embedding import embed, embed_ref
from kernels.inputs import expand_inputs, expand_inputs_ref
from kernels.norm import MAX_PARTS_ROWS, add_parts_norm, norm_parts, rms_norm, rms_norm_ref
from kernels.rope import rope_kv_write, rope_ref, rope_tables
from tests.kernels.test_kernels_paged_decode import ints
from tests.kernels.util import (
    DEVICE,
    DTYPES,
    IS_NATIVE,
    TOLERANCE,
    poisoned,
    randn,
    relative_error,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 576), (5, 123), (3, 1024)])
def test_rms_norm_matches_float64(dtype, rows, columns) -> None:
    x, weight = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype, seed=1)
    out = poisoned(rows, columns, dtype=dtype)
    rms_norm(out, x, weight, 1e-6)
    assert relative_error(out, rms_norm_ref(x, weight, 1e-6, torch.float64)) < TOLERANCE[dtype]
    rms_norm(x, x, weight, 1e-6)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "rows", "columns"), [(2, 5, 123), (3, 2, 576), (1, 1, 1024)])
def test_parts_are_added_to_the_stream_and_the_sum_is_normed(dtype, parts, rows, columns) -> None:
    wide = randn(rows, 2 * columns, dtype=dtype)
    hidden, weight = wide[:, :columns], randn(columns, dtype=dtype, seed=1)
    behind = wide[:, columns:].clone()
    pieces = randn(parts, rows, columns, dtype=torch.float32, seed=2)
    expected = hidden.double() + pieces.double().sum(0)
    normed = poisoned(rows, columns, dtype=dtype)
    add_parts_norm(normed, hidden, pieces, weight, 1e-6)
    assert relative_error(hidden, expected) < TOLERANCE[dtype]
    assert torch.equal(wide[:, columns:], behind)
    # Of the sum as it was rounded, what a norm by itself makes of it: bit for bit where both add up
    # squares in one order, which on a device their numbers of warps decide.
    alone = poisoned(rows, columns, dtype=dtype)
    rms_norm(alone, hidden, weight, 1e-6)
    rtol = 2 * torch.finfo(dtype).eps if IS_NATIVE else 0.0
    torch.testing.assert_close(normed, alone, rtol=rtol, atol=0.0)


def test_products_are_cut_into_parts_where_they_are_deep_and_the_model_is_wide() -> None:
    assert norm_parts(80, 4096, 12288) == norm_parts(MAX_PARTS_ROWS, 4096, 14336) == 2
    assert norm_parts(MAX_PARTS_ROWS + 1, 4096, 12288) == 1, "prompts have tiles enough"
    assert norm_parts(64, 4096, 12288) == 1, "not measured"
    assert norm_parts(80, 4096, 4096) == 1
    assert norm_parts(80, 1024, 3072) == 1
    assert norm_parts(80, 4096, 12289) == 1, "parts are equal"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1536), (5, 123), (2, 1100)])
def test_silu_mul_matches_float64(dtype, rows, columns) -> None:
    x = randn(rows, 2 * columns, dtype=dtype) * 4
    out = poisoned(rows, columns, dtype=dtype)
    silu_mul(out, x)
    gate, up = x.double().chunk(2, -1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]
    assert relative_error(out, silu_mul_ref(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "with_norm"),
    [(9, 3, 64, False), (4, 2, 96, True), (2, 1, 128, True)],
)
def test_rope_rotates_q_and_writes_only_live_slots(
    dtype, num_q, num_kv, head_dim, with_norm
) -> None:
    num_tokens, block_size = 5, 16
    qkv = randn(num_tokens, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    before = qkv.clone()
    cos, sin = (t.to(DEVICE) for t in rope_tables(head_dim, 64))
    positions, slots = ints([0, 7, 63, 1, 2]), ints([33, 0, -1, 16, 47])
    caches = [poisoned(3, block_size, num_kv, head_dim, dtype=dtype) for _ in range(2)]
    norms = [randn(head_dim, dtype=dtype, seed=s) for s in (3, 4)] if with_norm else [None, None]
    rope_kv_write(qkv, *caches, cos, sin, positions, slots, num_q, *norms, eps=1e-6)
    heads = before.view(num_tokens, -1, head_dim)
    q = rope_ref(heads[:, :num_q].double().float(), cos, sin, positions, norms[0])
    k = rope_ref(heads[:, num_q : num_q + num_kv].float(), cos, sin, positions, norms[1])
    live = [0, 1, 3, 4]
    out = qkv.view(num_tokens, -1, head_dim)
    assert relative_error(out[live, :num_q], q[live]) < TOLERANCE[dtype]
    assert torch.equal(out[:, num_q:], heads[:, num_q:])
    assert torch.equal(out[2], heads[2]), "padding was written"
    flat_k, flat_v = (cache.flatten(0, 1) for cache in caches)
    live_slots = slots[live].long()
    assert relative_error(flat_k[live_slots], k[live]) < TOLERANCE[dtype]
    assert torch.equal(flat_v[live_slots], heads[live, num_q + num_kv :])
    others = [s for s in range(48) if s not in live_slots.tolist()]
    assert flat_k[others].isnan().all()
    assert flat_v[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "with_norm"),
    [(9, 3, 64, False), (10, 5, 96, True), (8, 1, 128, True), (20, 20, 16, True)],
)
def test_rope_without_queries_leaves_them_and_writes_the_same_keys_and_values(
    dtype, num_q, num_kv, head_dim, with_norm
) -> None:
    """Also where the step's prompts begin behind other tokens."""
    qkv = randn(6, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    qkv[1:, : num_q * head_dim] = float("nan")  # neither read nor written
    cos, sin = (t.to(DEVICE) for t in rope_tables(head_dim, 64))
    positions, slots = ints([9, 0, 7, 63, 1, 2]), ints([5, 33, 0, -1, 16, 47])
    norms = [randn(head_dim, dtype=dtype, seed=s) for s in (3, 4)] if with_norm else [None, None]
    one, other = ([poisoned(3, 16, num_kv, head_dim, dtype=dtype) for _ in "kv"] for _ in range(2))
    tables = (cos, sin, positions[1:], slots[1:], num_q, *norms)
    rope_kv_write(qkv[1:].clone(), *one, *tables)
    after = qkv.clone()
    rope_kv_write(after[1:], *other, *tables, with_queries=False)
    assert torch.equal(after.view(torch.int8), qkv.view(torch.int8))
    for cache, expected in zip(other, one, strict=True):
        assert torch.equal(cache.view(torch.int8), expected.view(torch.int8))
        assert int(cache.isfinite().all(-1).sum()) == 4 * num_kv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_in_the_cache_are_finite_whatever_a_job_computes(dtype) -> None:
    """A block goes to another job after this one: zero times NaN there would be NaN."""
    largest = torch.finfo(dtype).max
    qkv = randn(1, 4 * 16, dtype=dtype)
    qkv[0, 48:52] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    cos, sin = (t.to(DEVICE) for t in rope_tables(16, 8))
    caches = [poisoned(1, 4, 1, 16, dtype=dtype) for _ in range(2)]
    rope_kv_write(qkv, *caches, cos, sin, ints([3]), ints([2]), 2)
    written = caches[1][0, 2, 0]
    assert written.isfinite().all()
    assert written[0].abs() == largest
    assert written[1:4].tolist() == [largest, -largest, 1.0]
    assert torch.equal(written[4:], qkv[0, 52:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_gathers_through_the_token_table_and_zeroes_padding(dtype) -> None:
    weight = randn(50, 123, dtype=dtype)
    table = torch.randint(0, 50, (4, 9), dtype=torch.int32).to(DEVICE)
    rows, positions = ints([2, 0, -1, 3]), ints([8, 0, 4, 5])
    out = poisoned(4, 123, dtype=dtype)
    embed(out, weight, table, rows, positions)
    assert torch.equal(out, embed_ref(weight, table, rows, positions))
    assert not out[2].any()


@pytest.mark.parametrize("columns", [123, 2500])
def test_embed_leaves_what_stands_for_the_norm_behind_it(columns) -> None:
    dtype = DTYPES[-1]
    weight, norm = randn(50, columns, dtype=dtype), randn(columns, dtype=dtype, seed=2)
    table = torch.randint(0, 50, (4, 9), dtype=torch.int32).to(DEVICE)
    rows, positions = ints([2, 0, -1, 3]), ints([8, 0, 4, 5])
    out, scaled = (poisoned(4, columns, dtype=dtype) for _ in range(2))
    squares = new_squares(4, columns, torch.device(DEVICE)).fill_(float("nan"))
    found = embed(
        out, weight, table, rows, positions, next_norm=NextNorm(norm, scaled, squares, 1e-6)
    )
    expected = embed_ref(weight, table, rows, positions)
    assert torch.equal(out, expected)
    assert found is not None
    assert found.eps == 1e-6
    scale = torch.rsqrt(found.squares.sum(dim=1, keepdim=True) / columns + found.eps)
    wanted = rms_norm_ref(expected, norm, 1e-6, torch.float64)
    assert relative_error(found.scaled.double() * scale.double(), wanted) < TOLERANCE[dtype]
    assert not found.scaled[2].any()


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [300, 1, 0, 17]])
def test_expand_inputs_matches_the_reference(counts) -> None:
    bounds = ints([0, *torch.tensor(counts).cumsum(0).tolist()])
    total = int(bounds[-1])
    rows, num_computed = ints([2, 0, -1, 1]), ints([5, 31, 0, 16])
    tables = torch.randperm(4 * 20).reshape(4, 20).int().to(DEVICE)
    outputs = [
        torch.full((n,), -7, dtype=torch.int32, device=DEVICE) for n in (total, total, total, 4)
    ]
    expand_inputs(*outputs, rows, num_computed, bounds, tables, 16)
    reference = expand_inputs_ref(rows, num_computed, bounds, tables, 16)
    for out, expected in zip(outputs, reference, strict=True):
        assert torch.equal(out, expected.int())
