"""Every kernel of a step compiles for a GPU that is not there: the interpreter takes more than the
compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str) -> list[str]:
    """Lines that a Python module prints where kernels are compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
def test_all_programs_that_wait_for_each_other_run_at_once() -> None:
    """Decode attention that joins its partial results has no more programs than an H200 holds."""
    lines = [json.loads(line) for line in run("tests.kernels.joining_programs")]
    assert len(lines) > 8
    assert [line for line in lines if line["fit"] < line["wanted"]] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_of_decode_and_prompt_steps_compile_and_fit(dtype: str) -> None:
    arguments = ["--shapes", "tiny", "--dtypes", dtype, "--sizes", "1", "4", "--all"]
    lines = run("bench.compile_check", *arguments)
    report = json.loads(lines[-1])
    assert report["do_not_fit"] == []
    assert report["launches"] > 100
    names = {line.split()[0] for line in lines[:-1]}
    assert {"_paged_decode_kernel", "_prefill_kernel", "_fixed_gemm_kernel"} <= names
