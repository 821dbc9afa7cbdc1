"""Checkpoint readers: safetensors directories, GGUF files, dummy weights at true shapes."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine.loader.gguf_loader import load_gguf, read_gguf_spec
from engine.loader.report import LoadedModel, LoadProgress, ProgressCallback, no_progress
from engine.loader.safetensors_loader import load_safetensors
from engine.model.errors import CheckpointError
from engine.model.hf_config import read_hf_spec
from engine.model.spec import ModelSpec
from engine.model.weights import dummy_weights

__all__ = [
    "LoadProgress",
    "LoadedModel",
    "ProgressCallback",
    "load_dummy",
    "load_model",
    "no_progress",
    "read_spec",
]


def read_spec(path: Path) -> ModelSpec:
    """Facts of the model at `path` (a directory or a .gguf file), without reading its weights."""
    if path.is_dir():
        return read_hf_spec(path)
    if path.suffix == ".gguf":
        return read_gguf_spec(path)
    raise CheckpointError(f"{path} is neither a model directory nor a .gguf file")


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
    progress: ProgressCallback = no_progress,
) -> LoadedModel:
    """Load a directory or a .gguf file.

    keep_quantized leaves a GGUF file's matrices in their blocks.
    """
    if path.is_dir():
        return load_safetensors(path, dtype, device, progress)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype, device, keep_quantized, progress)
    raise CheckpointError(f"{path} is neither a model directory nor a .gguf file")


def load_dummy(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: ProgressCallback = no_progress,
) -> LoadedModel:
    """Random weights at the true shapes of the model at `path`; only its configuration is read."""
    started = time.perf_counter()
    spec = read_spec(path)
    weights = dummy_weights(spec, dtype, device)
    total_bytes = weights.num_bytes()
    progress(LoadProgress(total_bytes, total_bytes))
    return LoadedModel(spec, weights, 0, time.perf_counter() - started)
