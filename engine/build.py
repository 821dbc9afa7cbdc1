"""From settings to a runner that is ready: device, weights, KV cache, memory plan."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loader import ProgressCallback, no_progress
from engine.model.errors import DeviceUnavailableError
from engine.plan import Runner


def build_runner(config: EngineConfig, progress: ProgressCallback = no_progress) -> Runner:
    """Load the model and make its runner.

    progress is called while weights are read. Raises ConfigError for a setting that cannot be used,
    and the errors of `engine.model.errors`: a model that is not supported, a checkpoint that is
    damaged, weights or a cache that do not fit (with the numbers), a device that is not there.
    """
    if not config.model_path:
        raise ConfigError("model_path", config.model_path, "give a model directory or a .gguf file")
    if choose_device(config) == "cuda":
        from engine.gpu.build import build_gpu_runner

        return build_gpu_runner(config, progress)
    from engine.cpu.build import build_cpu_runner

    return build_cpu_runner(config, progress)


def choose_device(config: EngineConfig) -> str:
    """The device that `config` means on this machine: `cpu` or `cuda`."""
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "auto":
        return "cuda" if has_gpu else "cpu"
    if config.device == "cuda" and not has_gpu:
        raise DeviceUnavailableError("device is cuda, but torch finds no CUDA device")
    return config.device
