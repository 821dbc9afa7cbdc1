"""Staged uploads copy every byte, whatever the sizes and types, and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch

from engine.loader.upload import PinnedUpload, PlainUpload, make_upload, prefetch

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"


@pytest.mark.parametrize("shape", [(1,), (7, 3), (64, 16), (100, 33)], ids=str)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_a_staged_copy_equals_a_plain_one(
    shape: tuple[int, ...], source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    upload = PinnedUpload(buffer_bytes=1000, pin=IS_CUDA)
    source = torch.randn(shape).to(source_dtype)
    merged = torch.full((shape[0] + 5, *shape[1:]), -1.0, dtype=target_dtype, device=DEVICE)
    upload.copy(merged[2 : 2 + shape[0]], source)
    upload.finish()
    assert torch.equal(merged[2 : 2 + shape[0]].cpu(), source.to(target_dtype))
    assert (merged[:2] == -1).all()
    assert (merged[2 + shape[0] :] == -1).all()


def test_a_strided_target_is_refused() -> None:
    target = torch.zeros(4, 6)[:, :3]
    with pytest.raises(ValueError, match="not contiguous"):
        PinnedUpload(100, pin=False).copy(target, torch.zeros(4, 3))


def test_the_cpu_needs_no_staging(tmp_path) -> None:
    assert isinstance(make_upload("cpu"), PlainUpload)
    prefetch([tmp_path / "absent"])  # a hint may fail without harm
