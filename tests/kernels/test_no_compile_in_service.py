"""No step waits for a compilation once the idle work is done, whatever its mix of rows: told from
what Triton is asked for, on tensors without memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    "tiny:bfloat16:256:8192",
    "tiny:bfloat16:256:8192:deterministic",
    "tiny:float32:1:500:deterministic",
    "qwen3-8b:bfloat16:256:8192",
    "qwen3-8b:bfloat16:256:8192:deterministic",
    "qwen3-8b:bfloat16:20:100",
    "smollm2-135m:bfloat16:300:2000:deterministic",
)
MAX_PIECES = 40
"""Each of them is a whole step of padding, and requests may wait for one."""


@pytest.mark.timeout(180)
def test_after_the_idle_work_no_mix_of_rows_needs_another_kernel() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.service_variants", *CASES],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=160,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    late = {case: result["late"] for case, result in zip(CASES, found, strict=True)}
    assert late == {case: [] for case in CASES}
    assert all(result["prepared"] > 50 for result in found), "launches are seen"
    assert max(result["pieces"] for result in found) <= MAX_PIECES
