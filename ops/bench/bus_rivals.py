"""No-op jobs of other job queues on the benchmark's Redis, each in an environment that the caller
names; what it does not name is skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ops.bench.bus_redis import BenchRedis

HERE = Path(__file__).parent / "rivals"
TIMEOUT_S = 300.0


def measure_celery(server: BenchRedis, python: str, num_jobs: int, window: int) -> dict[str, Any]:
    """No-op tasks with results. python: an interpreter that has Celery; empty: skipped."""
    if not python:
        return {"skipped": "no --celery-python"}
    script = str(HERE / "celery_noop.py")
    return _run([python, script, server.url, str(num_jobs), str(window)])


def measure_bullmq(server: BenchRedis, modules: str, num_jobs: int, window: int) -> dict[str, Any]:
    """No-op jobs with results. modules: a directory with node_modules/bullmq; empty: skipped."""
    node = shutil.which("node")
    if not modules or node is None:
        return {"skipped": "no --bullmq-dir" if node else "no node on PATH"}
    script = str(HERE / "bullmq_noop.mjs")
    return _run([node, script, modules, str(server.port), str(num_jobs), str(window)])


def _run(argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{argv[1]} failed: {done.stderr[-1000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
