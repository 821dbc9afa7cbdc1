"""Staged uploads copy every byte, whatever the sizes and types, and refuse what they cannot do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.gpu_load import count_wrong, write_checkpoint
from engine.loader import LoadProgress, load_model, safetensors_loader, staging
from engine.loader.staging import (
    CHUNK_BYTES,
    MAX_STAGING_BYTES,
    MAX_THREADS,
    SLOTS_PER_THREAD,
    StagedUpload,
    Staging,
    Transfer,
    cut,
)
from engine.loader.upload import prefetch, upload
from engine.model.errors import CheckpointError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Staging(3, 1000)


@pytest.fixture
def write_tensors(tmp_path) -> Callable[..., list[Transfer]]:
    """Tensors -> a file with a head and a gap before the last one, and transfers out of it to
    targets of -1 that begin in the third row of a larger matrix."""
    files = []

    def write(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[Transfer]:
        content = b"x" * 13
        offsets = []
        for index, tensor in enumerate(tensors):
            content += b"y" * 5 * (index == len(tensors) - 1)
            offsets.append(len(content))
            content += tensor.view(-1).view(torch.uint8).numpy().tobytes()
        path = tmp_path / "weights"
        path.write_bytes(content)
        files.append(path.open("rb"))
        transfers = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            shape = (tensor.shape[0] + 5, *tensor.shape[1:])
            merged = torch.full(shape, -1.0, dtype=dtype, device=DEVICE)
            unread = torch.full_like(tensor, 9.0)
            target = merged[2 : 2 + tensor.shape[0]]
            transfers.append(Transfer(target, unread, files[-1], offset))
        return transfers

    yield write
    for file in files:
        file.close()


def send(transfers: list[Transfer], size: Staging = TINY) -> list[int]:
    """Upload; returns what was reported."""
    counts: list[int] = []
    StagedUpload(DEVICE, size).run(transfers, counts.append)
    return counts


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [8, 100, 1000, 1 << 20])
def test_every_byte_arrives_in_its_place_and_nowhere_else(
    write_tensors, source_dtype: torch.dtype, target_dtype: torch.dtype, chunk_bytes: int
) -> None:
    shapes = [(1,), (7, 3), (64, 16), (0, 4), (100, 33), (3, 5)]
    tensors = [torch.randn(shape).to(source_dtype) for shape in shapes]
    transfers = write_tensors(tensors, target_dtype)
    counts = send(transfers, Staging(3, chunk_bytes))
    for tensor, transfer in zip(tensors, transfers, strict=True):
        assert torch.equal(transfer.target.cpu(), tensor.to(target_dtype))
        merged = transfer.target._base
        assert (merged[:2] == -1).all()
        assert (merged[2 + len(tensor) :] == -1).all()
    assert sum(counts) == sum(transfer.num_bytes for transfer in transfers)


def test_chunks_hold_many_small_tensors_and_parts_of_large_ones(write_tensors) -> None:
    tensors = [torch.zeros(10), torch.zeros(20), torch.zeros(300), torch.zeros(4)]
    chunks = cut(write_tensors(tensors, torch.float32), 1001)
    assert [chunk.size for chunk in chunks] == [1000, 320, 16], "no float is cut in two"
    assert [len(chunk.pieces) for chunk in chunks] == [3, 1, 1]
    assert [chunk.offset for chunk in chunks] == [13, 1013, 1338], "the gap is not read"


def test_a_file_that_ends_inside_a_tensor_is_an_error_that_names_it(write_tensors) -> None:
    transfers = write_tensors([torch.randn(5000), torch.randn(50)], torch.float32)
    path = Path(transfers[0].file.name)
    os.truncate(path, 9000)
    with pytest.raises(CheckpointError, match=rf"{path} ends before byte \d+, inside a tensor"):
        send(transfers)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(write_tensors, monkeypatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    transfers = write_tensors([torch.randn(50)], torch.float32)
    monkeypatch.setattr(staging.os, "preadv", fail)
    with pytest.raises(CheckpointError, match=f"{transfers[0].file.name} cannot be read: .*output"):
        send(transfers)


def test_a_caller_that_gives_up_ends_the_reading(write_tensors, monkeypatch) -> None:
    def read_slowly(descriptor: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.01)
        return read(descriptor, views, offset)

    read = os.preadv
    monkeypatch.setattr(staging.os, "preadv", read_slowly)
    transfers = write_tensors([torch.randn(100_000)], torch.float32)
    reported: list[int] = []

    def give_up(count: int) -> None:
        reported.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StagedUpload(DEVICE, TINY).run(transfers, give_up)
    assert len(reported) == 1
    assert (transfers[0].target[-10:] == -1).all(), "400 chunks, of which few were read"


def test_a_strided_target_is_refused(write_tensors) -> None:
    (transfer,) = write_tensors([torch.zeros(4, 3)], torch.float32)
    strided = Transfer(torch.zeros(4, 6)[:, :3], transfer.source, transfer.file, transfer.offset)
    with pytest.raises(ValueError, match="not contiguous"):
        send([strided])


@pytest.mark.parametrize(
    ("threads", "chunk", "match"),
    [(0, 64, "num_threads is 0"), (2, 7, "chunk_bytes is 7"), (5, 64 << 20, "use smaller chunks")],
)
def test_a_staging_that_cannot_work_is_refused(threads: int, chunk: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Staging(threads, chunk)


@pytest.mark.parametrize(("processors", "threads"), [(1, 2), (2, 2), (6, 6), (16, 8), (128, 8)])
def test_there_is_a_thread_for_each_processor_within_limits(
    monkeypatch, processors: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert Staging.for_processors() == Staging(threads, CHUNK_BYTES)
    assert MAX_THREADS * SLOTS_PER_THREAD * CHUNK_BYTES <= MAX_STAGING_BYTES


def test_a_checkpoint_loads_alike_plainly_and_staged(tmp_path, monkeypatch) -> None:
    path = write_checkpoint("tiny", tmp_path, "cpu")
    plain = load_model(path, torch.bfloat16)
    monkeypatch.setattr(
        safetensors_loader,
        "upload",
        lambda transfers, device, sent, size: StagedUpload(DEVICE, Staging(2, 5000)).run(
            transfers, sent
        ),
    )
    seen: list[LoadProgress] = []
    staged = load_model(path, torch.bfloat16, DEVICE, progress=seen.append)
    assert count_wrong(staged, path, every=1) == 0
    assert staged.read_bytes == plain.read_bytes
    assert len(seen) > 10
    assert seen == sorted(seen, key=lambda p: p.done_bytes)
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_file_that_vanished_is_an_error_that_names_it(tmp_path, monkeypatch) -> None:
    path = write_checkpoint("tiny", tmp_path, "cpu")
    shards = safetensors_loader.shard_paths(path)
    monkeypatch.setattr(safetensors_loader, "shard_paths", lambda directory: shards)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0]} cannot be read"):
        load_model(path, torch.bfloat16)


def test_the_cpu_needs_no_staging_and_meta_reads_without_keeping(write_tensors) -> None:
    (transfer,) = write_tensors([torch.randn(300)], torch.float32)
    if DEVICE.type == "cpu":
        counts: list[int] = []
        upload([transfer], "cpu", counts.append)
        assert counts == [1200]
        assert (transfer.target == 9).all(), "the mapped tensor is copied, here one of nines"
    nowhere = torch.empty(300, device="meta")
    counts = []
    upload([Transfer(nowhere, transfer.source, transfer.file, 13)], "meta", counts.append, TINY)
    assert counts == [1000, 200] or counts == [200, 1000]
    prefetch([Path("absent")])  # a hint may fail without harm
