"""A Hugging Face directory's *.safetensors -> merged `ModelWeights`.

Files are memory-mapped; each tensor is copied once, straight into its rows of the merged parameter,
in file order. To a GPU it is read from the file instead (`staging.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from engine.loader.report import LoadedModel, LoadProgress, ProgressCallback, no_progress
from engine.loader.sources import Target, hf_targets, is_ignorable_hf
from engine.loader.staging import Staging, Transfer
from engine.loader.upload import prefetch, upload
from engine.model.errors import CheckpointError, TensorMismatchError
from engine.model.hf_config import read_hf_spec
from engine.model.spec import ModelSpec
from engine.model.weights import Matrix, assemble, named_shapes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_safetensors(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: ProgressCallback = no_progress,
    staging: Staging | None = None,
) -> LoadedModel:
    """Read config.json and all tensors; parameters end up on `device` in `dtype`.

    staging: as of `upload`. Raises the errors of `read_hf_spec`, TensorMismatchError if tensors are
    missing or unexpected, CheckpointError for a wrong shape or a damaged or absent file.
    """
    started = time.perf_counter()
    spec = read_hf_spec(directory)
    shards = shard_paths(directory)
    targets = hf_targets(spec)
    _check_names(shards, targets, spec)
    merged = {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape in named_shapes(spec)
    }
    total_bytes = sum(path.stat().st_size for path in shards)
    done_bytes = 0

    def report(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(LoadProgress(done_bytes, total_bytes))

    prefetch(shards)
    with ExitStack() as files:
        transfers = [
            Transfer(_rows_of(merged, targets[name], name, tensor), tensor, file, offset)
            for name, tensor, file, offset in _tensors(shards, targets, files)
        ]
        upload(transfers, device, report, staging)
    progress(LoadProgress(total_bytes, total_bytes))
    parameters: dict[str, Matrix] = dict(merged)
    return LoadedModel(spec, assemble(spec, parameters), done_bytes, time.perf_counter() - started)


def _rows_of(
    merged: Mapping[str, torch.Tensor], target: Target, name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Where a tensor goes. Raises CheckpointError if it does not fit there."""
    if tuple(tensor.shape) != target.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, the configuration implies {target.shape}"
        )
    return merged[target.name][target.row : target.row + target.shape[0]]


def shard_paths(directory: Path) -> list[Path]:
    """The checkpoint's files, from the index if there is one.

    Raises CheckpointError if one is absent.
    """
    index = directory / _INDEX
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is no safetensors index: {error!r}") from error
        paths = [directory / name for name in names]
    else:
        paths = [directory / _SINGLE]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist")
    return paths


def _check_names(shards: list[Path], targets: Mapping[str, Target], spec: ModelSpec) -> None:
    found: set[str] = set()
    for path in shards:
        with _open(path) as shard:
            found.update(shard.keys())
    unexpected = {name for name in found - targets.keys() if not is_ignorable_hf(name, spec)}
    missing = targets.keys() - found
    if missing or unexpected:
        raise TensorMismatchError(missing, unexpected)


def _tensors(
    shards: list[Path], targets: Mapping[str, Target], files: ExitStack
) -> Iterator[tuple[str, torch.Tensor, BinaryIO, int]]:
    """Every tensor, mapped and not read yet, and where it lies in its file, which `files` close."""
    for path in shards:
        shard = files.enter_context(_open(path))
        with _errors_of(path):
            file = files.enter_context(path.open("rb"))
        offsets = tensor_offsets(file)
        for name in shard.offset_keys():
            if name in targets:
                yield name, shard.get_tensor(name), file, offsets[name]


def tensor_offsets(file: BinaryIO) -> dict[str, int]:
    """Tensor name -> offset of its first byte in a safetensors file.

    The file begins with the header's length in 8 bytes, little-endian, then the header, JSON.
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _open(path: Path) -> safe_open:
    with _errors_of(path):
        return safe_open(path, framework="pt", device="cpu")


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Whatever opening a file raises as CheckpointError."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
