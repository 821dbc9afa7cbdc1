"""Loading: checkpoint bytes a second from the page cache to the device, and start to ready.

    python -m bench.gpu_load SHAPE --dir SCRATCH --out results.jsonl [--device cpu]
        [--threads 4 8 16] [--chunk-mib 4 8 16] [--load-only]

Writes a sharded safetensors directory of random numbers at the shape, loads it (the page cache is
warm from the writing), compares some tensors with the files, and starts a process that says when
its runner is ready. With --threads or --chunk-mib every combination is loaded, first without a
device (`load_read_gb_s`: what reading alone reaches), then to it; without, the engine's own choice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.report import ResultFile
from engine.loader import LoadedModel, read_spec
from engine.loader.safetensors_loader import load_safetensors, shard_paths
from engine.loader.sources import hf_targets
from engine.loader.staging import Staging
from engine.model.weights import LayerWeights
from ops.bench.shapes import SHAPES, write_shape

SHARD_BYTES = 4 << 30
NUM_LOADS = 3
MIB = 1 << 20


def write_checkpoint(shape: str, directory: Path, device: str) -> Path:
    """A model directory with random bf16 weights in shards of about 4 GB."""
    path = write_shape(shape, directory)
    targets = hf_targets(read_spec(path))
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    number = size = 0

    def flush() -> None:
        nonlocal number, size
        number += 1
        name = f"model-{number:05}.safetensors"
        save_file(shard, path / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        size = 0

    for name, target in targets.items():
        values = torch.randn(target.shape, dtype=torch.bfloat16, device=device)
        shard[name] = values.cpu()
        size += values.numel() * values.element_size()
        if size >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def parameter(loaded: LoadedModel, name: str) -> torch.Tensor:
    """A merged parameter by its name in `named_shapes`."""
    if name.startswith("layers."):
        _, index, field = name.split(".")
        layer: LayerWeights = loaded.weights.layers[int(index)]
        found = getattr(layer, field)
    else:
        found = getattr(loaded.weights, name)
    assert isinstance(found, torch.Tensor), name
    return found


def count_wrong(loaded: LoadedModel, path: Path, every: int = 7) -> int:
    """Of every seventh tensor, those that are not what the file says."""
    targets = hf_targets(loaded.spec)
    wrong = 0
    for shard_path in shard_paths(path):
        with safe_open(shard_path, framework="pt", device="cpu") as shard:
            for name in list(shard.keys())[::every]:
                target = targets[name]
                merged = parameter(loaded, target.name)
                rows = merged[target.row : target.row + target.shape[0]]
                wrong += not torch.equal(rows.cpu(), shard.get_tensor(name))
    return wrong


def measure_load(path: Path, device: str, staging: Staging, results: ResultFile) -> None:
    """Load a few times; the best counts, all are reported beside it, the first one pins memory."""
    staged = {"threads": staging.num_threads, "chunk_mib": staging.chunk_bytes // MIB}
    for what, to in (("load_read_gb_s", "meta"), ("load_gb_s", device)):
        rates = []
        for _ in range(NUM_LOADS):
            loaded = load_safetensors(path, torch.bfloat16, to, staging=staging)
            rates.append(round(loaded.read_bytes / 1e9 / loaded.load_s, 2))
        details = {} if to == "cpu" else staged  # nothing is staged there
        results.add(what, max(rates), "GB/s", all=rates, **details)
        print(f"    {details} {rates}", flush=True)
    wrong = count_wrong(loaded, path)
    if wrong:
        raise RuntimeError(f"{wrong} tensors differ from the checkpoint after loading")


def stagings(threads: list[int], chunk_mib: list[int]) -> list[Staging]:
    """Every combination; the engine's own number where none is given."""
    own = Staging.for_processors()
    return [
        Staging(num, mib * MIB)
        for num in threads or [own.num_threads]
        for mib in chunk_mib or [own.chunk_bytes // MIB]
    ]


def measure_ready(shape: str, device: str, results: ResultFile) -> None:
    """Seconds from the start of a process, imports included, to its runner and to a token."""
    command = [sys.executable, "-m", "bench.gpu_load", shape, "--child", "--device", device]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        marks = {}
        for line in child.stdout:
            if line.startswith("mark "):
                marks[line.split()[1]] = time.perf_counter() - began
    if child.returncode or "ready" not in marks:
        raise RuntimeError(f"the process that should get ready ended with {child.returncode}")
    results.add(f"{shape}.ready_s", marks["ready"], "s", first_token_s=round(marks["token"], 2))


def be_ready(shape: str, device: str, scratch: Path) -> None:
    """In the child: say when the runner is there, and when one request is answered."""
    from engine.build import build_runner
    from engine.config import EngineConfig
    from engine.loop import EngineLoop
    from engine.scheduler import Scheduler
    from ops.bench.load import Workload, drive

    path = write_shape(shape, scratch)
    max_model_len = min(4096, int(SHAPES[shape]["max_position_embeddings"]))
    config = EngineConfig(
        model_path=str(path), device=device, load_format="dummy",  # type: ignore[arg-type]
        max_model_len=max_model_len,
    )  # fmt: skip
    runner = build_runner(config)
    print("mark ready", flush=True)
    loop = EngineLoop(runner, Scheduler(runner.info))
    drive(loop, Workload(1, 17, 2, runner.info.vocab_size))
    print("mark token", flush=True)


def main() -> int:
    """Write, load, compare, start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--dir", type=Path, default=Path("/tmp/tokenbus-load"))
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, nargs="+", default=[], help="that read, to a GPU")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[], help="that one reads")
    parser.add_argument("--load-only", action="store_true", help="do not start a runner")
    parser.add_argument("--child", action="store_true", help="get ready, say so, end")
    args = parser.parse_args()
    if args.device == "cpu" and (args.threads or args.chunk_mib):
        parser.error("--threads and --chunk-mib are of loads to a GPU: leave --device cpu out")
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.child:
        be_ready(args.shape, args.device, args.dir)
        return 0
    results = ResultFile(args.out)
    choices = stagings(args.threads, args.chunk_mib)
    if not args.load_only:
        measure_ready(args.shape, args.device, results)
    path = write_checkpoint(args.shape, args.dir, args.device)
    try:
        for staging in choices:
            measure_load(path, args.device, staging, results)
    finally:
        shutil.rmtree(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
