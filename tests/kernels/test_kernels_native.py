"""What only a GPU can show: production tiles, graphs, programmatic dependent launch, real bf16
instructions."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_partials import new_decode_workspace
from kernels.decode_plan import new_decode_plan, plan_decode
from kernels.fixed_gemm import fixed_linear, fixed_linear_ref
from kernels.fixed_tiles import FixedGemmTile
from kernels.paged_decode import paged_decode, paged_decode_ref
from kernels.prefill import prefill_attention, prefill_attention_ref
from kernels.small_gemm import small_linear, small_linear_ref
from kernels.split_k import new_gemm_workspace
from kernels.tiles import decode_tile
from tests.kernels.test_kernels_paged_decode import ints, make_cache
from tests.kernels.util import DEVICE, IS_NATIVE, poisoned, randn, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_NATIVE, reason="needs a CUDA device")]
BF16 = torch.bfloat16


def decode_with_table_tile(q, caches, rows, seq_lens, num_programs, in_order=True):
    """With the tile for any number of rows, or, where the order is free, with that for these."""
    tile = decode_tile(q.shape[2], q.dtype, len(rows), same_bits=in_order)
    num_kv_heads = caches[0].shape[2]
    plan = new_decode_plan(len(rows), tile, num_programs, 4096, q.device, in_order)
    workspace = new_decode_workspace(plan, q.shape[1], num_kv_heads, q.shape[2])
    out = poisoned(*q.shape, dtype=q.dtype)
    for _ in range(3):  # a race shows as a difference between repeats
        again = poisoned(*q.shape, dtype=q.dtype)
        plan_decode(plan, seq_lens, num_kv_heads)
        again.fill_(float("nan"))  # the launch that must lie between plan and attention
        scale = q.shape[2] ** -0.5
        paged_decode(again, q, *caches, rows, seq_lens, plan, workspace, scale, pdl=True)
        assert out.isnan().all() or torch.equal(out, again)
        out = again
    return out


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 1, 256), (3, 3, 96)]
)
def test_decode_bits_do_not_depend_on_the_batch(heads, kv_heads, head_dim, block_size) -> None:
    """A row of 2,000 tokens alone (tiles), among 40 (groups) and at one program (rows): bit for
    bit."""
    lengths = [2000] + [1 + (i * 397) % 1900 for i in range(39)]
    caches = make_cache(40, 2048, block_size, kv_heads, head_dim, BF16)
    q = randn(40, heads, head_dim, dtype=BF16, seed=5)
    rows, seq_lens = ints(list(range(40))), ints(lengths)
    together = decode_with_table_tile(q, caches, rows, seq_lens, 528)
    expected = paged_decode_ref(q, *caches, rows, seq_lens, head_dim**-0.5, dtype=torch.float64)
    assert relative_error(together, expected) < 6e-3
    for programs in (2, 132, 4096):
        assert torch.equal(decode_with_table_tile(q, caches, rows, seq_lens, programs), together)
    for few in (1, 4):
        part = decode_with_table_tile(q[:few].clone(), caches, rows[:few], seq_lens[:few], 528)
        assert torch.equal(part, together[:few])
        free = decode_with_table_tile(q[:few], caches, rows[:few], seq_lens[:few], 264, False)
        assert relative_error(free, expected[:few]) < 6e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 1, 256), (3, 3, 96)]
)
def test_prefill_bits_do_not_depend_on_the_chunks(heads, kv_heads, head_dim) -> None:
    caches = make_cache(1, 700, 16, kv_heads, head_dim, BF16)
    q = randn(700, heads, head_dim, dtype=BF16, seed=5)
    rows, scale = ints([0]), head_dim**-0.5
    whole, pieces = poisoned(*q.shape, dtype=BF16), poisoned(*q.shape, dtype=BF16)
    args = (*caches, rows)
    prefill_attention(whole, q, *args, ints([700]), ints([0, 700]), scale)
    expected = prefill_attention_ref(
        q, *args, ints([700]), ints([0, 700]), scale, dtype=torch.float64
    )
    assert relative_error(whole, expected) < 6e-3
    for a, b in [(0, 133), (133, 134), (134, 500), (500, 700)]:
        prefill_attention(pieces[a:b], q[a:b], *args, ints([b]), ints([0, b - a]), scale)
    assert torch.equal(whole, pieces)


WIDE_TILES = [
    FixedGemmTile(64, 128, 128, 4, 3, parallel=True, tma=True),
    FixedGemmTile(128, 256, 64, 8, 3, tma=True),
    FixedGemmTile(128, 128, 64, 8, 4, tma=True, persistent=True),
    FixedGemmTile(64, 32, 64, 4, 5),
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1024, 3072), (960, 576), (4096, 4096)])
def test_fixed_linear_bits_do_not_depend_on_m(n, k, dtype) -> None:
    x, weight = randn(1100, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    workspace = new_gemm_workspace(torch.device(DEVICE))
    whole = poisoned(1100, n, dtype=dtype)
    fixed_linear(whole, x, weight, workspace=workspace)
    expected = fixed_linear_ref(x, weight, dtype=torch.float64)
    assert relative_error(whole, expected) < 6e-3
    for m in (1, 7, 64, 65, 128, 200, 256, 1000):
        out = poisoned(m, n, dtype=dtype)
        fixed_linear(out, x[:m], weight, workspace=workspace, pdl=m % 2 == 0)
        assert torch.equal(out, whole[:m]), m
    for tile in WIDE_TILES:
        out = poisoned(1100, n, dtype=dtype)
        fixed_linear(out, x, weight, workspace=workspace, tile=tile)
        assert torch.equal(out, whole), tile


GLU_TILES = [
    FixedGemmTile(64, 32, 64, 4, 6, tma=True),
    FixedGemmTile(64, 128, 64, 4, 4),
    FixedGemmTile(128, 128, 64, 8, 4, tma=True),
    FixedGemmTile(128, 128, 64, 8, 4, tma=True, persistent=True),
]


@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (3072, 1024), (1536, 576), (968, 576)])
def test_an_activations_bits_do_not_depend_on_m(n, k) -> None:
    x, weight = randn(1100, k, dtype=BF16), randn(2 * n, k, dtype=BF16, seed=1) * k**-0.5
    whole = poisoned(1100, n, dtype=BF16)
    fixed_linear(whole, x, weight, glu=True)
    expected = fixed_linear_ref(x, weight, glu=True, dtype=torch.float64)
    assert relative_error(whole, expected) < 6e-3
    for m in (1, 7, 64, 65, 128, 200, 256, 1000):
        out = poisoned(m, n, dtype=BF16)
        fixed_linear(out, x[:m], weight, pdl=m % 2 == 0, glu=True)
        assert torch.equal(out, whole[:m]), m
    for tile in GLU_TILES:
        out = poisoned(1100, n, dtype=BF16)
        fixed_linear(out, x, weight, tile=tile, glu=True)
        assert torch.equal(out, whole), tile


@pytest.mark.parametrize("m", [1, 2, 8, 33, 64])
def test_a_chain_with_dependent_launches_replays_to_the_same_numbers(m) -> None:
    """Four blocks of fused layers in a graph; a missing wait would read a half-written input."""
    hidden, inner, blocks = 1024, 3072, 4
    norm = randn(hidden, dtype=BF16, seed=9)
    weights = [
        (
            randn(2 * inner, hidden, dtype=BF16, seed=2 * i) * hidden**-0.5,
            randn(hidden, inner, dtype=BF16, seed=2 * i + 1) * inner**-0.5,
        )
        for i in range(blocks)
    ]
    start = randn(m, hidden, dtype=BF16, seed=7)
    stream, gated = start.clone(), poisoned(m, inner, dtype=BF16)
    scratch = poisoned(m, hidden, dtype=BF16)
    workspace = new_gemm_workspace(torch.device(DEVICE))

    def chain() -> None:
        stream.copy_(start)
        for up, down in weights:
            small_linear(
                gated, stream, up, workspace,
                norm_weight=norm, eps=1e-6, norm_scratch=scratch, glu=True,
            )  # fmt: skip
            small_linear(stream, gated, down, workspace, residual=stream)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    expected = start.double()
    for up, down in weights:
        inner_out = small_linear_ref(
            expected, up, norm_weight=norm, eps=1e-6, glu=True, dtype=torch.float64
        )
        expected = small_linear_ref(inner_out, down, residual=expected, dtype=torch.float64)
    graph.replay()
    first = stream.clone()
    assert relative_error(first, expected) < 1.5e-2
    for _ in range(50):
        graph.replay()
        assert torch.equal(stream, first)


def test_launchers_allocate_nothing_on_the_device() -> None:
    caches = make_cache(2, 256, 16, 8, 128, BF16)
    q, rows, seq_lens = randn(2, 32, 128, dtype=BF16), ints([0, 1]), ints([200, 100])
    tile = decode_tile(128, BF16)
    plan = new_decode_plan(2, tile, 264, 256, q.device)
    workspace = new_decode_workspace(plan, 32, 8, 128)
    gemm_workspace = new_gemm_workspace(q.device)
    weight, out, y = (
        randn(1024, 4096, dtype=BF16),
        torch.empty_like(q),
        poisoned(2, 1024, dtype=BF16),
    )

    def step() -> None:
        plan_decode(plan, seq_lens, 8)
        paged_decode(out, q, *caches, rows, seq_lens, plan, workspace, 0.1)
        small_linear(y, out.view(2, 4096), weight, gemm_workspace)

    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
