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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_of_decode_and_prompt_steps_compile_and_fit(dtype: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    command = ["-m", "bench.compile_check", "--shapes", "tiny", "--dtypes", dtype]
    done = subprocess.run(
        [sys.executable, *command, "--sizes", "1", "4", "--all"],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    report = json.loads(lines[-1])
    assert report["do_not_fit"] == []
    assert report["launches"] > 100
    names = {line.split()[0] for line in lines[:-1]}
    assert {"_paged_decode_kernel", "_prefill_kernel", "_fixed_gemm_kernel"} <= names
