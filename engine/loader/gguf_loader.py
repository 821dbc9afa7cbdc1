"""A GGUF file -> merged `ModelWeights`, dense float or in the file's own blocks.

llama.cpp stores the q and k rows of llama models so that rotated pairs are neighbours; rows are put
back into the order of the Hugging Face checkpoints here, so runners know one order only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.loader.gguf_reader import open_gguf
from engine.loader.report import LoadedModel, LoadProgress, ProgressCallback, no_progress
from engine.loader.sources import Target, gguf_targets
from engine.model.errors import CheckpointError, TensorMismatchError, UnsupportedModelError
from engine.model.gguf_config import parse_gguf_config
from engine.model.quantized import QuantizedMatrix, QuantKind, concat_rows
from engine.model.spec import ModelSpec
from engine.model.weights import Matrix, assemble

_DENSE_TYPES = ("F32", "F16", "BF16")
_ROPE_FACTORS = "rope_freqs.weight"
_TOKENS = "tokenizer.ggml.tokens"


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
    progress: ProgressCallback = no_progress,
) -> LoadedModel:
    """Read a GGUF file.

    With keep_quantized, matrices stay `QuantizedMatrix` where all merged parts have one block
    format; everything else is dequantized to `dtype` on `device`. Raises the errors of
    `parse_gguf_config`, UnsupportedModelError for a tensor type that is not understood,
    TensorMismatchError and CheckpointError as the names say.
    """
    started = time.perf_counter()
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = _spec(reader, tensors)
    targets = gguf_targets(spec)
    unexpected = tensors.keys() - targets.keys() - {_ROPE_FACTORS}
    missing = targets.keys() - tensors.keys()
    if missing or unexpected:
        raise TensorMismatchError(missing, unexpected)
    is_llama = spec.architecture == "LlamaForCausalLM"
    parts: dict[str, list[tuple[Target, Matrix]]] = {}
    total_bytes = sum(int(tensor.n_bytes) for tensor in tensors.values())
    done_bytes = 0
    for name, tensor in tensors.items():
        target = targets.get(name)
        if target is not None:
            matrix = _read(tensor, target, is_llama)
            if not keep_quantized and isinstance(matrix, QuantizedMatrix):
                matrix = matrix.dequantize()
            parts.setdefault(target.name, []).append((target, matrix))
        done_bytes += int(tensor.n_bytes)
        progress(LoadProgress(done_bytes, total_bytes))
    merged = {name: _merge(group, dtype, device) for name, group in parts.items()}
    return LoadedModel(spec, assemble(spec, merged), done_bytes, time.perf_counter() - started)


def read_gguf_spec(path: Path) -> ModelSpec:
    """The model's facts without its weights. Raises as `load_gguf`."""
    reader = open_gguf(path)
    return _spec(reader, {tensor.name: tensor for tensor in reader.tensors})


def _spec(reader: gguf.GGUFReader, tensors: Mapping[str, Any]) -> ModelSpec:
    metadata = {}
    for key, field in reader.fields.items():
        is_array = field.types and field.types[0] is gguf.GGUFValueType.ARRAY
        metadata[key] = range(len(field.data)) if is_array else field.contents()
    divisors: tuple[float, ...] = ()
    if _ROPE_FACTORS in tensors:
        values = np.asarray(tensors[_ROPE_FACTORS].data, dtype=np.float32)
        divisors = tuple(float(value) for value in values)
    return parse_gguf_config(metadata, tensors.keys(), divisors)


def _read(tensor: Any, target: Target, is_llama: bool) -> Matrix:
    """One tensor, checked, in Hugging Face row order."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if shape != target.shape:
        raise CheckpointError(
            f"{tensor.name} has shape {shape}, the metadata implies {target.shape}"
        )
    order = _half_split_order(target.heads, shape[0]) if is_llama and target.heads else None
    type_name = tensor.tensor_type.name
    if type_name in _DENSE_TYPES:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        values = values if order is None else values[order]
        return torch.from_numpy(np.array(values, dtype=np.float32))
    if type_name not in QuantKind.__members__ or len(shape) != 2:
        supported = [*_DENSE_TYPES, *QuantKind.__members__]
        raise UnsupportedModelError("GGUF tensor type", f"{type_name} of {tensor.name}", supported)
    rows = np.asarray(tensor.data).reshape(shape[0], -1)
    matrix = QuantizedMatrix(rows, QuantKind(type_name), (shape[0], shape[1]))
    return matrix if order is None else matrix.permuted(order)


def _half_split_order(heads: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Row order that puts pair members head_dim / 2 apart instead of side by side, head by head."""
    pairs = np.arange(num_rows).reshape(heads, -1, 2)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _merge(
    group: list[tuple[Target, Matrix]], dtype: torch.dtype, device: torch.device | str
) -> Matrix:
    """Parts of one parameter, in row order, as one matrix."""
    matrices = [matrix for _, matrix in sorted(group, key=lambda entry: entry[0].row)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    if len(quantized) == len(matrices) and len({matrix.kind for matrix in quantized}) == 1:
        return quantized[0] if len(quantized) == 1 else concat_rows(quantized)
    dense = [m.dequantize() if isinstance(m, QuantizedMatrix) else m for m in matrices]
    whole = dense[0] if len(dense) == 1 else torch.cat(dense)
    return whole.to(device=device, dtype=dtype)
