"""The demonstration on the real model: what a newcomer sees first."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from ops.models import CATALOG, DEFAULT_MODEL, is_cached

pytestmark = [
    pytest.mark.timeout(400),  # loads the model, and two cores may be busy
    pytest.mark.skipif(
        not is_cached(CATALOG[DEFAULT_MODEL]) and "CI" not in os.environ,
        reason=f"tokenbus model fetch {DEFAULT_MODEL}",
    ),
]


async def test_eight_jobs_over_both_doors_end_well_and_the_worker_stops() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.demo",
        "--json",
        "--max-tokens",
        "8",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + output.decode()
    said = json.loads(output)
    jobs = said["jobs"]
    assert [job["door"] for job in jobs] == ["redis", "zmq"] * 4
    assert {job["finish_reason"] for job in jobs} <= {"length", "stop"}
    assert all(1 <= job["tokens"] <= 8 and job["ttft_ms"] > 0 for job in jobs)
    assert all(job["text"].strip() for job in jobs)
    assert said["tokens"] == sum(job["tokens"] for job in jobs)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in said["worker"]["pids"].values())
