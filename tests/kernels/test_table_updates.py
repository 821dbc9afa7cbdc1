"""Table updates equal their torch references, padding and untouched memory included."""

from __future__ import annotations

import pytest
import torch

from kernels.table_updates import (
    apply_block_changes,
    apply_block_changes_ref,
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


@pytest.mark.parametrize("width", [1, 5, 64, 1500])
def test_gathered_rows_equal_the_reference(width: int) -> None:
    src = torch.randn(11, width)
    index = torch.tensor([3, -1, 10, 3, 0], dtype=torch.int32)
    out = torch.full((5, width), float("nan"), device=DEVICE)
    gather_rows(src.to(DEVICE), index.to(DEVICE), out)
    assert torch.equal(out.cpu(), gather_rows_ref(src, index))
