"""Assembles the GPU runner: weights to the device, a memory plan, tables, buffers, graphs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.gpu.buffers import new_shared_buffers
from engine.gpu.decoder import GpuDecoder
from engine.gpu.graph_cache import GraphCache, num_graphs
from engine.gpu.kv_memory import new_kv_memory
from engine.gpu.linear import Linears
from engine.gpu.memory import MemoryPlan, StepLimits, plan_memory
from engine.gpu.row_tables import RowTables
from engine.gpu.runner import GpuRunner
from engine.gpu.step_costs import step_costs
from engine.loader import LoadedModel, ProgressCallback, load_dummy, load_model, read_spec
from engine.model.spec import ModelSpec
from engine.plan import RunnerInfo
from kernels.product_tiles import max_fused_rows
from kernels.sampling_tables import MAX_STOP_IDS
from kernels.split_k import new_gemm_workspace

_BLOCK_SIZE = 64
_MAX_NUM_SEQS = 256
_MAX_PROMPT_TOKENS = 8192
"""Of one step, beside a row that decodes for each place."""
_GIB = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = structlog.get_logger(__name__)


def build_gpu_runner(config: EngineConfig, progress: ProgressCallback) -> GpuRunner:
    """A ready `GpuRunner`. Raises as `engine.build.build_runner`."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if config.dtype == "auto" else _DTYPES[config.dtype]
    path = Path(config.model_path)
    limits = _limits(config, read_spec(path))
    started = time.perf_counter()
    loaded = _load(config, path, dtype, device, progress)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    spec = replace(loaded.spec, max_model_len=limits.max_model_len)
    plan = plan_memory(
        spec,
        limits,
        element_bytes=dtype.itemsize,
        weight_bytes=loaded.weights.num_bytes(),
        kv_cache_bytes=config.kv_cache_bytes,
        utilization=config.gpu_memory_utilization,
        num_graphs=num_graphs(step_costs(spec, dtype.itemsize), limits),
        deterministic=config.deterministic,
        device=device,
    )
    log.info("memory.planned", **plan.in_gib())
    info = _info(config, path, spec, limits, plan, dtype, load_s)
    log.info(
        "weights.loaded",
        seconds=round(load_s, 2),
        gb_per_s=round(plan.weight_bytes / 1e9 / max(load_s, 1e-9), 1),
    )
    return _assemble(config, loaded, spec, limits, plan, info, dtype, device)


def _assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    spec: ModelSpec,
    limits: StepLimits,
    plan: MemoryPlan,
    info: RunnerInfo,
    dtype: torch.dtype,
    device: torch.device,
) -> GpuRunner:
    tables = RowTables(limits, spec.vocab_size, device)
    cache = new_kv_memory(spec, plan.num_blocks, limits.block_size, dtype, device)
    decoder = GpuDecoder(
        spec,
        loaded.weights,
        cache,
        tables.block_table,
        tables.token_table,
        Linears(
            config.deterministic,
            new_gemm_workspace(device),
            max_fused_rows(spec.hidden_size, dtype),
        ),
    )
    buffers = new_shared_buffers(spec, limits, dtype, device, config.deterministic)
    graphs = GraphCache(decoder, tables, buffers, limits)
    return GpuRunner(info, decoder, tables, buffers, graphs, limits)


def _limits(config: EngineConfig, spec: ModelSpec) -> StepLimits:
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"the model's own limit is {spec.max_model_len}"
        )
    max_num_seqs = config.max_num_seqs or _MAX_NUM_SEQS
    max_num_batched_tokens = config.max_num_batched_tokens or _MAX_PROMPT_TOKENS + max_num_seqs
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=config.max_model_len or spec.max_model_len,
        block_size=config.block_size_tokens or _BLOCK_SIZE,
    )


def _load(
    config: EngineConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback,
) -> LoadedModel:
    if config.load_format == "dummy":
        return load_dummy(path, dtype, device, progress=progress)
    return load_model(path, dtype, device, progress=progress)


def _info(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    limits: StepLimits,
    plan: MemoryPlan,
    dtype: torch.dtype,
    load_s: float,
) -> RunnerInfo:
    return RunnerInfo(
        model=config.model_name or path.stem,
        architecture=spec.architecture,
        device=torch.cuda.get_device_name(),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=spec.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        block_size=limits.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        load_s=load_s,
        weight_bytes=plan.weight_bytes,
        kv_bytes=plan.kv_bytes,
        max_held_stop_ids=MAX_STOP_IDS,
        # Prompt attention and decode attention round differently: what a decode row made first has
        # to be made again by decode rows for the same bits.
        replays_by_decode=config.deterministic,
    )
