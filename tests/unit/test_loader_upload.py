"""Staged uploads copy every byte, whatever the sizes and types, and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_load import count_wrong, write_checkpoint
from engine.loader import load_model, safetensors_loader
from engine.loader import upload as upload_module
from engine.loader.upload import FileSpan, PinnedUpload, PlainUpload, make_upload, prefetch

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


@pytest.mark.parametrize("shape", [(1,), (7, 3), (100, 33)], ids=str)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
def test_bytes_may_come_from_the_file_by_several_threads(
    tmp_path, monkeypatch, shape: tuple[int, ...], source_dtype: torch.dtype
) -> None:
    monkeypatch.setattr(upload_module, "PIECE_BYTES", 96)
    source = torch.randn(shape).to(source_dtype)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 13 + source.view(torch.uint8).numpy().tobytes() + b"y" * 7)
    upload = PinnedUpload(buffer_bytes=1000, pin=IS_CUDA)
    target = torch.full(shape, -1.0, dtype=torch.bfloat16, device=DEVICE)
    with path.open("rb") as file:
        unread = torch.full(shape, 9.0, dtype=source_dtype)
        upload.copy(target, unread, FileSpan(file.fileno(), 13))
        upload.finish()
    assert torch.equal(target.cpu(), source.to(torch.bfloat16))


def test_a_file_that_ends_inside_a_tensor_is_an_error(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234567")
    upload = PinnedUpload(buffer_bytes=100, pin=IS_CUDA)
    target = torch.zeros(4, device=DEVICE)
    with path.open("rb") as file, pytest.raises(EOFError, match="9 bytes before"):
        upload.copy(target, torch.zeros(4), FileSpan(file.fileno(), 0))
    upload.finish()


def test_a_checkpoint_loads_alike_by_both_uploads(tmp_path, monkeypatch) -> None:
    path = write_checkpoint("tiny", tmp_path, "cpu")
    plain = load_model(path, torch.bfloat16)
    monkeypatch.setattr(
        safetensors_loader, "make_upload", lambda device: PinnedUpload(5000, pin=False)
    )
    staged = load_model(path, torch.bfloat16)
    assert count_wrong(staged, path, every=1) == 0
    assert staged.read_bytes == plain.read_bytes


def test_a_strided_target_is_refused() -> None:
    target = torch.zeros(4, 6)[:, :3]
    with pytest.raises(ValueError, match="not contiguous"):
        PinnedUpload(100, pin=False).copy(target, torch.zeros(4, 3))


def test_the_cpu_needs_no_staging(tmp_path) -> None:
    assert isinstance(make_upload("cpu"), PlainUpload)
    prefetch([tmp_path / "absent"])  # a hint may fail without harm
