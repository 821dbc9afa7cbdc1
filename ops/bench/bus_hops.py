"""Where the two latencies of the ZeroMQ door go, hop by hop."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from broker.ring.records import Kind, encode_step
from ops.bench import bus_stamps
from ops.bench.bus_worker import BenchEngine, BusWorker
from ops.bench.bus_zmq import BenchClient, one_token
from tokenbus.protocol import MessageType

Times = npt.NDArray[np.int64]

# Where a message passes, in order. The client's and the engine's stations are the benchmark's own,
# the others the broker's.
SUBMIT_PATH = (
    "client_send", "gateway_awake", "gateway_frame", "text", "gateway_prepared",
    "ledger_submit", "link_submit", "ring_written", "engine_awake", "engine_has_it",
)  # fmt: skip
TOKEN_PATH = (
    "engine_write", "link_awake", "ledger_steps", "gateway_publish",
    "router_send", "router_sent", "client_has_it",
)  # fmt: skip


def measure_hops(num_jobs: int) -> dict[str, float]:
    """p50 of every hop of one job after the other, and of their tokens; microseconds. Each hop is
    named by the station that it ends at; a station costs some 0.3 us.
    """
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as directory:
        path = Path(directory, "stamps.npy")
        with BusWorker(stamps=path) as worker, BenchEngine(worker.link_path) as engine:
            worker.wait_for("ready")
            client = BenchClient(worker.endpoint)
            own = _run_jobs(client, engine, num_jobs)
            client.close()
        stations = bus_stamps.load(path) | own
    result = {**hops("submit", SUBMIT_PATH, stations), **hops("token", TOKEN_PATH, stations)}
    skipped = result["submit.gateway_awake"]
    return result | {"submit.from_gateway": round(result["submit.whole"] - skipped, 1)}


def _run_jobs(client: BenchClient, engine: BenchEngine, num_jobs: int) -> dict[str, Times]:
    """One job of one token after the other: the times at the client and at the engine."""
    clock = time.perf_counter_ns
    rows = []
    for i in range(num_jobs):
        send_ns = clock()
        client.send(MessageType.SUBMIT, job=f"job-{i}", prompt="hello world", max_tokens=1)
        rid, awake_ns = engine.await_submit()
        seen_ns = clock()
        client.receive(MessageType.ACCEPTED)
        record = encode_step(one_token(i, rid))
        write_ns = clock()
        engine.write(Kind.STEP, record)
        client.receive(MessageType.TOKENS)
        rows.append((send_ns, awake_ns, seen_ns, write_ns, clock()))
        client.receive(MessageType.DONE)
    names = ("client_send", "engine_awake", "engine_has_it", "engine_write", "client_has_it")
    return dict(zip(names, np.array(rows).T, strict=True))


def hops(name: str, path: tuple[str, ...], stations: dict[str, Times]) -> dict[str, float]:
    """p50 of each hop and of the whole way. A message passes a station at the station's first time
    after it passed the one before.
    """
    result = {}
    start_ns = before_ns = stations[path[0]]
    for station in path[1:]:
        all_ns = stations[station]
        index = np.searchsorted(all_ns, before_ns)
        now_ns = all_ns[np.minimum(index, len(all_ns) - 1)]
        result[f"{name}.{station}"] = _median_us(now_ns - before_ns)
        before_ns = now_ns
    return result | {f"{name}.whole": _median_us(before_ns - start_ns)}


def _median_us(times_ns: Times) -> float:
    """Without the first tenth, in which everything is cold."""
    return round(float(np.median(times_ns[len(times_ns) // 10 :])) / 1e3, 1)
