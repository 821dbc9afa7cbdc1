"""Kernels on GPUs with less shared memory: compiled for them, run by none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, tempfile
from pathlib import Path
from bench import offline
offline.ARCH, offline.MAX_SHARED_BYTES = int(sys.argv[1]), int(sys.argv[2])
from bench import compile_check
offline.pretend(pdl=False)
with tempfile.TemporaryDirectory() as scratch:
    spec = compile_check.two_layer_spec("smollm2-135m", Path(scratch))
for deterministic in (False, True):
    compile_check.steps_of(spec, compile_check.DTYPES["bfloat16"], deterministic, [1, 8, 64])
print(max(kernel.shared_bytes for kernel in offline.compiled_kernels()))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "shared_bytes"), [(89, 101_376)])
def test_every_kernel_fits_a_gpu_with_less_shared_memory(arch, shared_bytes) -> None:
    """Triton refuses a kernel that does not fit when it is first launched."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(arch), str(shared_bytes)],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert 50_000 < int(done.stdout) <= shared_bytes
