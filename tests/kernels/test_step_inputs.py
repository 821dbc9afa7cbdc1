"""Device-built step inputs equal their torch references, padding and untouched memory included."""

from __future__ import annotations

import pytest
import torch

from kernels.step_inputs import (
    apply_block_changes,
    apply_block_changes_ref,
    build_tokens,
    build_tokens_ref,
    gather_rows,
    gather_rows_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("num", [1, 3, 255, 300])
def test_changed_block_table_entries_land_and_all_others_stay(num: int) -> None:
    gen = torch.Generator().manual_seed(num)
    table = torch.randint(0, 1000, (40, 33), dtype=torch.int32, generator=gen)
    flat = torch.randperm(40 * 33, generator=gen)[:num]
    changes = torch.stack(
        [flat // 33, flat % 33, torch.randint(0, 1000, (num,), generator=gen)]
    ).int()
    changes[0, ::7] = -1
    expected = table.clone()
    apply_block_changes_ref(changes, expected)
    actual = table.clone().to(DEVICE)
    apply_block_changes(changes.contiguous().to(DEVICE), actual)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1, 1, 1], [7, 1, 300], [513, 1, 0, 2]], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_packed_tokens_equal_the_reference(counts: list[int], block_size: int) -> None:
    gen = torch.Generator().manual_seed(len(counts))
    num = len(counts)
    token_table = torch.randint(0, 50_000, (9, 1024), dtype=torch.int32, generator=gen)
    block_table = torch.randint(0, 2**20, (9, 1024 // block_size), dtype=torch.int32, generator=gen)
    rows = torch.randperm(9, generator=gen)[:num].int()
    if num > 1:
        rows[1] = -1
    computed = torch.randint(0, 400, (num,), dtype=torch.int32, generator=gen)
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    total = int(cu[-1])
    ids = torch.full((total + 5,), -7, dtype=torch.int32, device=DEVICE)
    positions, slots = ids.clone(), torch.full((total + 5,), -7, dtype=torch.int64, device=DEVICE)
    lens = torch.full((num + 5,), -7, dtype=torch.int32, device=DEVICE)
    build_tokens(
        *(t.to(DEVICE) for t in (rows, computed, cu, token_table, block_table)),
        block_size=block_size, max_new=max(counts),
        input_ids=ids, positions=positions, slots=slots, seq_lens=lens,
    )  # fmt: skip
    expected = build_tokens_ref(rows, computed, cu, token_table, block_table, block_size)
    for got, want in zip((ids, positions, slots, lens), expected, strict=True):
        assert torch.equal(got.cpu()[:-5], want)
        assert (got.cpu()[-5:] == -7).all()


@pytest.mark.parametrize("width", [1, 5, 64, 1500])
def test_gathered_rows_equal_the_reference(width: int) -> None:
    src = torch.randn(11, width)
    index = torch.tensor([3, -1, 10, 3, 0], dtype=torch.int32)
    out = torch.full((5, width), float("nan"), device=DEVICE)
    gather_rows(src.to(DEVICE), index.to(DEVICE), out)
    assert torch.equal(out.cpu(), gather_rows_ref(src, index))
