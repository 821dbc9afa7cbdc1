"""Assembles the CPU runner: loads weights, plans memory, packs matrices."""

from __future__ import annotations

import os
from pathlib import Path

import structlog
import torch

from engine.config import EngineConfig
from engine.cpu.int8 import has_int8_products
from engine.cpu.kv_cache import KvCache
from engine.cpu.linear import Scheme
from engine.cpu.model import CpuModel
from engine.cpu.pace import ThreadPacer, cores_are_free
from engine.cpu.runner import CpuRunner
from engine.cpu.step_inputs import TILE_TOKENS
from engine.errors import ConfigError
from engine.loader import LoadedModel, ProgressCallback, load_dummy, load_model, read_spec
from engine.model.errors import MemoryPlanError
from engine.model.quantized import QuantizedMatrix
from engine.model.spec import ModelSpec
from engine.model.weights import parameter_count
from engine.plan import RunnerInfo

_GIB = 1 << 30
_BLOCK_SIZE = 16
_MAX_NUM_SEQS = 16
_MAX_BATCHED_TOKENS = 512
_DEFAULT_KV_BYTES = 1 * _GIB
_KV_SHARE_OF_FREE = 0.4  # the rest stays for activations, the broker and other programs
_ELEMENT_BYTES = 4

log = structlog.get_logger(__name__)


def build_cpu_runner(config: EngineConfig, progress: ProgressCallback) -> CpuRunner:
    """A ready `CpuRunner`. Raises as `engine.build.build_runner`."""
    if config.dtype not in ("auto", "float32"):
        raise ConfigError("dtype", config.dtype, "the CPU runner computes in float32: use auto")
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    path = Path(config.model_path)
    spec = read_spec(path)
    max_model_len = _model_len(config, spec)
    max_num_seqs = config.max_num_seqs or _MAX_NUM_SEQS
    _check_weights_fit(path, spec, config)
    loaded = _load(path, config, progress)
    block_size = config.block_size_tokens or _BLOCK_SIZE
    num_blocks = plan_num_blocks(config, spec, block_size, max_model_len, available_bytes())
    scheme = _scheme(config, loaded)
    model = CpuModel.prepare(spec, loaded.weights, KvCache(spec, num_blocks, block_size), scheme)
    info = RunnerInfo(
        model=config.model_name or path.stem,
        architecture=spec.architecture,
        device="cpu",
        dtype="float32",
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_batched_tokens(config, max_num_seqs),
        load_s=loaded.load_s,
        weight_bytes=model.weight_bytes,
        kv_bytes=model.cache.num_bytes,
        quantization=scheme.value,
        chunk_align_tokens=TILE_TOKENS,
        replays_by_decode=True,
    )
    _log_ready(info, num_threads)
    return CpuRunner(info, model, ThreadPacer(num_threads, lambda: cores_are_free(num_threads)))


def _scheme(config: EngineConfig, loaded: LoadedModel) -> Scheme:
    if not isinstance(loaded.weights.layers[0].gate_up, QuantizedMatrix):
        return Scheme.NONE
    return Scheme.INT8 if config.quantization == "auto" and has_int8_products() else Scheme.PACKED


def _log_ready(info: RunnerInfo, num_threads: int) -> None:
    log.info(
        "runner.ready",
        device="cpu",
        threads=num_threads,
        weights_gib=round(info.weight_bytes / _GIB, 3),
        kv_gib=round(info.kv_bytes / _GIB, 3),
        kv_tokens=info.num_blocks * info.block_size,
        load_s=round(info.load_s, 2),
        quantization=info.quantization,
    )


def plan_num_blocks(
    config: EngineConfig, spec: ModelSpec, block_size: int, max_model_len: int, free_bytes: int
) -> int:
    """How many KV blocks the cache gets.

    `kv_cache_bytes` if set, else the least of 1 GiB, a share of free memory, and what all rows at
    full length could use. Raises MemoryPlanError if not even one sequence of full length fits.
    """
    block_bytes = block_size * spec.kv_bytes_per_token(_ELEMENT_BYTES)
    columns = -(-max_model_len // block_size)
    budget = config.kv_cache_bytes
    if not budget:
        most = columns * (config.max_num_seqs or _MAX_NUM_SEQS) * block_bytes
        budget = min(_DEFAULT_KV_BYTES, int(free_bytes * _KV_SHARE_OF_FREE), most)
    elif budget > free_bytes:
        advice = "lower kv_cache_bytes"
        raise MemoryPlanError("the KV cache", budget, free_bytes, advice)
    num_blocks = budget // block_bytes
    if num_blocks < columns:
        advice = (
            f"set max_model_len to at most {num_blocks * block_size} "
            f"or kv_cache_bytes to at least {columns * block_bytes}"
        )
        what = f"the KV cache of one sequence of {max_model_len} tokens"
        raise MemoryPlanError(what, columns * block_bytes, budget, advice)
    return num_blocks


def available_bytes() -> int:
    """Memory this process may still take, by the kernel's estimate."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"the model's own limit is {spec.max_model_len}"
        )
    return config.max_model_len or spec.max_model_len


def _batched_tokens(config: EngineConfig, max_num_seqs: int) -> int:
    """A step has room for one tile of a prompt beside decode rows, or prompts would wait long."""
    least = TILE_TOKENS + max_num_seqs
    if 0 < config.max_num_batched_tokens < least:
        raise ConfigError(
            "max_num_batched_tokens",
            config.max_num_batched_tokens,
            f"the CPU runner needs at least {least}: {TILE_TOKENS} and max_num_seqs",
        )
    return config.max_num_batched_tokens or max(_MAX_BATCHED_TOKENS, least)


def _check_weights_fit(path: Path, spec: ModelSpec, config: EngineConfig) -> None:
    packs = config.quantization != "none" and path.suffix == ".gguf"
    needed = parameter_count(spec) * (1 if packs else _ELEMENT_BYTES)
    free = available_bytes()
    if needed > free:
        advice = "use a smaller or a quantized (GGUF) model"
        raise MemoryPlanError("the model's weights", needed, free, advice)


def _load(path: Path, config: EngineConfig, progress: ProgressCallback) -> LoadedModel:
    if config.load_format == "dummy":
        return load_dummy(path, torch.float32, progress=progress)
    keep_quantized = config.quantization != "none"
    return load_model(path, torch.float32, keep_quantized=keep_quantized, progress=progress)
