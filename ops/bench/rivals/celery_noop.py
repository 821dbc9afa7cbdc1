"""No-op jobs with Celery, for `tokenbus bench bus`. Runs in an environment that has Celery:

    python celery_noop.py REDIS_URL NUM_JOBS WINDOW      prints one JSON line

Starts one worker with its default pool, and keeps WINDOW jobs open with their results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from celery import Celery, __version__

URL = os.environ.get("BENCH_REDIS_URL", "")
app = Celery("celery_noop", broker=URL, backend=URL)
app.conf.update(
    worker_prefetch_multiplier=64, task_track_started=False, worker_send_task_events=False
)


def nothing() -> int:
    """What each job does."""
    return 1


noop = app.task(nothing, name="noop")


def measure(num_jobs: int, window: int) -> dict[str, float | str]:
    """Jobs a second with their results, `window` of them open at a time."""
    [noop.delay().get(timeout=60) for _ in range(10)]
    start_s = time.perf_counter()
    waiting = [noop.delay() for _ in range(window)]
    sent = window
    for result in waiting:  # grows while it is read
        result.get(timeout=60)
        if sent < num_jobs:
            waiting.append(noop.delay())
            sent += 1
    elapsed_s = time.perf_counter() - start_s
    return {"version": __version__, "jobs": sent, "jobs_per_s": round(sent / elapsed_s)}


def main() -> None:
    """See the module."""
    url, num_jobs, window = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    here = os.path.dirname(os.path.abspath(__file__))
    env = {**os.environ, "BENCH_REDIS_URL": url}
    if not URL:
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    argv = [sys.executable, "-m", "celery", "-A", "celery_noop", "worker", "--loglevel", "error"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    worker = subprocess.Popen([*argv, *quiet], cwd=here, env=env, stdout=subprocess.DEVNULL)
    try:
        print(json.dumps(measure(num_jobs, window)))
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main()
