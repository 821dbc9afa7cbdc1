"""The parts of a GPU session: which commands, how long they may take, and what a dry run does
instead."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts' commands depend on."""

    out: Path
    device: str
    model: Path | None

    @property
    def is_dry(self) -> bool:
        """No GPU: tiny shapes, to try the code out."""
        return self.device == "cpu"

    @property
    def results(self) -> Path:
        """Where result lines go."""
        return self.out / "results.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that run one after the other (or at the same time), in so many seconds together."""

    name: str
    limit_s: float
    commands: list[list[str]]
    at_once: bool = False
    interprets: bool = True  # in a dry run: kernels run in Triton's interpreter
    is_extra: bool = False  # runs only where it is named


def engine_command(s: Setting, shape: str, *extras: str) -> list[str]:
    """gpu_engine for a shape, or its smallest form."""
    out = ["--out", str(s.results), "--trace", str(s.out / f"trace-{Path(shape).stem}.json")]
    if s.is_dry:
        small = [
            "--device",
            "cpu",
            "--batches",
            "1",
            "2",
            "--input-len",
            "24",
            "--output-len",
            "40",
        ]
        small += ["--max-model-len", "256", "--run", "2:8"]
        return ["bench.gpu_engine", "tiny", *out, *small, *extras]
    return ["bench.gpu_engine", shape, *out, *extras]


def test_commands(s: Setting) -> list[list[str]]:
    """Kernel tests on the device, a process for each file. Native compilation is a part itself."""
    files = sorted(Path("tests/kernels").glob("test_*.py"))
    if s.is_dry:
        files = [
            Path("tests/kernels/test_kernels_rng.py"),
            Path("tests/kernels/test_gpu_runner.py"),
        ]
    plain = ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--tb=short"]
    plain += ["-W", "ignore"]
    return [["pytest", *plain, str(f)] for f in files if f.stem != "test_native_compile"]


def compile_commands(s: Setting) -> list[list[str]]:
    """Fill the compile cache: engine kernels of each shape."""
    if s.is_dry:
        return [["bench.compile_check", "--shapes", "tiny", "--dtypes", "bfloat16", "--sizes", "1"]]
    sizes = [str(n) for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)]
    return [
        ["bench.compile_check", "--shapes", shape, "--dtypes", "bfloat16", "--sizes", *sizes]
        for shape in ("qwen3-8b", "qwen3-0.6b", "smollm2-135m")
    ]


def sweep_parts(s: Setting) -> list[Part]:
    """Compile in several processes, then time in one."""
    table = ["--write", str(s.out / "fixed_gemm_tiles.json")]
    if s.is_dry:
        tiny = ["--models", "tiny", "--limit", "2"]
        names = ["--names", "9x3.b1.kv1152", "--limit", "1"]
        return [
            Part("sweep_fixed", 60, [["bench.sweep_fixed_gemm", *tiny, *table]]),
            Part("sweep_decode", 60, [["bench.sweep_decode", *names]]),
        ]
    parts = []
    for name, module, seconds, options, is_extra in (
        ("sweep_fixed", "bench.sweep_fixed_gemm", 70, table, False),
        ("sweep_decode", "bench.sweep_decode", 40, [], False),
        ("sweep_gemm", "bench.sweep_gemm", 90, [], True),
        ("sweep_prefill", "bench.sweep_prefill", 30, [], True),
    ):
        compiles = [[module, "--compile-part", f"{part}/14"] for part in range(14)]
        timed = [module, "--seconds", str(seconds), *options]
        parts.append(Part(f"{name}_compile", 90, compiles, at_once=True, is_extra=is_extra))
        parts.append(Part(name, seconds + 40, [timed], is_extra=is_extra))
    return parts


def model_parts(s: Setting) -> list[Part]:
    """What needs real weights."""
    if s.model is None:
        return []
    model, out = str(s.model), ["--out", str(s.results), "--device", s.device]
    parity = ["bench.gpu_parity", model, *out]
    worker = ["bench.gpu_worker", model, "--name", "smollm2-135m", *out]
    alone = engine_command(s, model, "--batches", "1", "8", "64")
    if s.is_dry:
        parity += ["--prompts", "1", "--tokens", "2", "--runs", "2", "--long", "100"]
        worker += ["--jobs", "1", "--input-len", "8", "--output-len", "4", "--settle-s", "0"]
        alone = []
    return [
        Part("parity", 150, [parity]),
        Part("worker", 130, [worker, alone] if alone else [worker]),
    ]


def extra_parts(s: Setting) -> list[Part]:
    """Kernels in steady state, and variants of whole decode steps (in a dry run: only their
    names)."""
    power = ["bench.gpu_power", "--out", str(s.results), "--device", s.device]
    search = ["--out", str(s.results), "--device", s.device, "--rows", "8", "--seconds", "110"]
    if s.is_dry:
        search.append("--list")
    wide = ["--attention", "64,4,3,2,tma", "64,4,4,2,tma", "64,4,3,3,tma", "64,4,2,4,tma"]
    wide += ["--share", "driver", "60", "75", "90"]
    small = ["--attention", "64,4,4,2,tma", "64,4,3,2,tma", "64,4,3,3,tma", "64,4,6,2,tma"]
    small += ["--share", "driver", "40", "50", "60", "75"]
    return [
        Part("power", 90, [power], is_extra=True),
        Part(
            "step_search",
            400,
            [
                ["bench.step_search", "qwen3-8b", *search, *wide],
                ["bench.step_search", "qwen3-0.6b", *search, *small, "--small-gemm"],
                ["bench.step_search", "smollm2-135m", *search, *small, "--small-gemm"],
            ],
            is_extra=True,
        ),
    ]


def all_parts(s: Setting) -> list[Part]:
    """Every part, in the order in which they run."""
    load = ["bench.gpu_load", "tiny" if s.is_dry else "qwen3-8b", "--device", s.device]
    load += ["--dir", str(s.out / "load" if s.is_dry else Path("/tmp/tokenbus-load"))]
    rival = ["--out", str(s.results), "--device", s.device]
    if s.is_dry:
        rival += ["--batches", "1", "--input-len", "32", "--output-len", "8"]
    kernels = ["--tiny"] if s.is_dry else ["--groups", "decode,fixed", "--seconds", "45"]
    plain = ["--extras", "ttft"]
    most = ["--extras", "ttft", "allocations", "host", "run256"]
    deterministic = ["--deterministic"] if not s.is_dry else []
    return [
        Part("compile", 120, compile_commands(s), at_once=True, interprets=False),
        Part("tests", 240, test_commands(s), at_once=True),
        *sweep_parts(s),
        Part(
            "kernels",
            90,
            [["bench.gpu_kernels", "--out", str(s.results), *kernels]],
        ),
        Part("load", 120, [[*load, "--out", str(s.results)]]),
        *model_parts(s),
        Part("qwen3-0.6b", 90, [engine_command(s, "qwen3-0.6b", *plain)]),
        Part("smollm2-135m", 90, [engine_command(s, "smollm2-135m", *plain)]),
        Part("qwen3-8b", 200, [engine_command(s, "qwen3-8b", *most)]),
        Part(
            "deterministic",
            130,
            [engine_command(s, "qwen3-8b", "--extras", *deterministic)],
        ),
        Part(
            "rival",
            200,
            [
                ["bench.gpu_rival", shape, *rival]
                for shape in (["tiny"] if s.is_dry else ["qwen3-0.6b", "smollm2-135m"])
            ],
        ),
        *extra_parts(s),
    ]
