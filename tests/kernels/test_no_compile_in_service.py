"""No step waits for a compilation once the idle work is done, whatever its mix of rows: told from
what Triton is asked for, on tensors without memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    "tiny:bfloat16:256:8448",
    "tiny:bfloat16:256:8448:deterministic",
    "tiny:float32:1:500:deterministic",
    "qwen3-8b:bfloat16:256:8448",
    "qwen3-8b:bfloat16:256:8448:deterministic",
    "qwen3-8b:bfloat16:20:100",
    "smollm2-135m:bfloat16:300:2000:deterministic",
)
MAX_PIECES = 40
"""Each of them is a whole step of padding, and requests may wait for one."""
LATE_IN_PLAIN_GRAPHS = {"_fetch_inputs_kernel"}
"""What plain prompt graphs may compile: the arrival of their inputs. Idle moments capture such
graphs first."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Case -> what the script says of it."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.service_variants", *CASES],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.timeout(600)
def test_after_the_idle_work_no_mix_of_rows_needs_another_kernel(found) -> None:
    assert {case: result["late"] for case, result in found.items()} == {case: [] for case in CASES}
    assert all(result["prepared"] > 40 for result in found.values()), "launches are seen"
    assert max(result["pieces"] for result in found.values()) <= MAX_PIECES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_graph_captured_for_a_request_compiles_nothing_of_its_own(found, case) -> None:
    """Its inputs are laid out as those of steps that are launched kernel by kernel."""
    late = found[case]["captured_late"]
    assert {text.split(":")[0] for text in late["PLAIN"]} <= LATE_IN_PLAIN_GRAPHS
    assert late["PLAIN"], "captures are seen"
    assert late["FILTERED"] == late["PENALISED"] == []
