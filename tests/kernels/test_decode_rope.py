"""Decode attention that turns and keeps its new tokens, beside the two kernels that do the same."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_partials import new_decode_workspace
from kernels.decode_plan import new_decode_plan, plan_decode
from kernels.new_tokens import NewTokens
from kernels.paged_decode import paged_decode
from kernels.rope import rope_kv_write, rope_tables
from kernels.tiles import DecodeTile
from tests.kernels.test_kernels_paged_decode import ints, make_cache, poison_tails
from tests.kernels.util import DEVICE, DTYPES, TOLERANCE, poisoned, randn, relative_error

LENGTHS = [1, 16, 17, 0, 33, 130]


def attend(qkv, caches, rows, lengths, num_heads, num_programs, window, tile, new_tokens):
    """Decode attention of packed qkv rows over these caches."""
    num_kv_heads, head_dim = caches[0].shape[2:]
    q = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
    plan = new_decode_plan(len(rows), tile, num_programs, 256, q.device, in_order=False)
    plan_decode(plan, lengths, num_kv_heads, window)
    out = poisoned(*q.shape, dtype=q.dtype)
    paged_decode(
        out, q, *caches, rows, lengths, plan,
        new_decode_workspace(plan, num_heads, num_kv_heads, head_dim), head_dim**-0.5, window,
        new_tokens=new_tokens,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_programs", [1, 64])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "with_norm", "tma"),
    [(9, 3, 64, 0, False, False), (4, 2, 96, 20, True, False), (2, 2, 128, 0, True, True)],
)
def test_new_tokens_are_turned_kept_and_seen(
    dtype, num_programs, num_heads, num_kv_heads, head_dim, window, with_norm, tma
) -> None:
    rows, lengths = ints([3, 0, 4, 5, 1, 2]), ints(LENGTHS)
    caches = make_cache(6, 144, 16, num_kv_heads, head_dim, dtype)
    by_row = dict(zip(rows.tolist(), LENGTHS, strict=True))
    poison_tails(*caches, [max(by_row[row] - 1, 0) for row in range(6)])
    qkv = randn(6, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=8)
    cos, sin = (t.to(DEVICE) for t in rope_tables(head_dim, 160))
    norms = [randn(head_dim, dtype=dtype, seed=s) for s in (3, 4)] if with_norm else [None, None]
    apart, at_once = ([cache.clone() for cache in caches[:2]] for _ in range(2))
    tile = DecodeTile(16, 4, 2, 1, tma=tma and dtype.itemsize == 2)
    new = NewTokens(cos, sin, *norms)
    args = (rows, lengths, num_heads, num_programs, window, tile)
    out = attend(qkv.clone(), (*at_once, caches[2]), *args, new)

    positions = lengths - 1
    blocks = caches[2][rows.long(), positions.clamp(0).long() // 16]
    slots = torch.where(lengths > 0, blocks * 16 + positions % 16, -1).int()
    turned = qkv.clone()
    rope_kv_write(turned, *apart, cos, sin, positions, slots, num_heads, *norms)
    expected = attend(turned, (*apart, caches[2]), *args, None)

    live = [i for i, n in enumerate(LENGTHS) if n]
    assert relative_error(out[live], expected[live].double()) < TOLERANCE[dtype]
    assert out[3].isnan().all(), "padding was written"
    for mine, theirs in zip(at_once, apart, strict=True):
        written = slots[live].long()
        kept = relative_error(mine.flatten(0, 1)[written], theirs.flatten(0, 1)[written].double())
        assert kept < TOLERANCE[dtype]
        mine.flatten(0, 1)[written] = theirs.flatten(0, 1)[written]
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), "another slot was written"


def test_new_tokens_have_no_place_in_a_fixed_order() -> None:
    dtype = DTYPES[-1]
    caches = make_cache(1, 32, 16, 1, 16, dtype)
    qkv = randn(1, 48, dtype=dtype)
    plan = new_decode_plan(1, DecodeTile(16, 4, 2, 1), 1, 8, qkv.device)
    cos, sin = (t.to(DEVICE) for t in rope_tables(16, 32))
    with pytest.raises(ValueError, match="order of sums"):
        paged_decode(
            poisoned(1, 1, 16, dtype=dtype), qkv[:, :16].view(1, 1, 16), *caches, ints([0]),
            ints([5]), plan, new_decode_workspace(plan, 1, 1, 16), 0.25,
            new_tokens=NewTokens(cos, sin),
        )  # fmt: skip
