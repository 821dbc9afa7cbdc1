"""The fairness part of the bus benchmark: what one tenant, or one client, can do to the others."""

from __future__ import annotations

import time

import numpy as np
import zmq

from ops.bench.bus_worker import BusWorker, cpu_s
from ops.bench.bus_zmq import BenchClient
from tokenbus.protocol import MessageType, decode

STEP_MS = 5.0
ROWS = 32
ROUNDS = 12  # of each kind


def measure_flood(num_jobs: int, num_probes: int) -> dict[str, float]:
    """p95 of the time to first token of a tenant with one job at a time: alone, then while another
    tenant has num_jobs jobs in the queue. Milliseconds.
    """
    with BusWorker(max_queued=2 * num_jobs) as worker:
        worker.start_engine(max_num_seqs=ROWS, step_ms=STEP_MS)
        probe = BenchClient(worker.endpoint, "bench-client-probe-0", tenant="quiet")
        solo_ms = _first_tokens_ms(probe, num_probes, "solo")
        flood = BenchClient(worker.endpoint, "bench-client-flood-0", tenant="loud")
        for i in range(num_jobs):
            flood.send(MessageType.SUBMIT, job=f"loud-{i}", prompt=f"{i}", max_tokens=64)
        for _ in range(num_jobs):
            flood.receive(MessageType.ACCEPTED)
        beside_ms = _first_tokens_ms(probe, num_probes, "beside")
        waiting = _queued(probe)
        probe.close()
        flood.close()
    solo, beside = np.percentile(solo_ms, 95), np.percentile(beside_ms, 95)
    return {
        "jobs": num_jobs,
        "waiting_at_end": waiting,
        "solo_p95_ms": round(float(solo), 2),
        "beside_p95_ms": round(float(beside), 2),
        "ratio": round(float(beside / solo), 2),
    }


def measure_slow_reader(num_clients: int, num_tokens: int) -> dict[str, float]:
    """Times between two TOKENS messages of one client, over all clients but the first: while the
    first reads, and while it reads nothing. Milliseconds.

    A few late steps decide a p99, and on a shared machine they come from elsewhere. So rounds of
    both kinds take turns, in pairs whose order changes, and the ratio is the median over the pairs:
    its quartiles tell whether the machine is quiet enough to say anything. The broker's work for a
    step is told as well.
    """
    num_steps = num_tokens // ROUNDS
    gaps_ms: dict[bool, list[float]] = {False: [], True: []}
    work_s = {False: 0.0, True: 0.0}
    ratios: list[float] = []
    with BusWorker() as worker:
        worker.start_engine(max_num_seqs=num_clients, step_ms=STEP_MS)
        for i in range(ROUNDS):
            p99_ms: dict[bool, float] = {}
            for is_stuck in (False, True) if i % 2 else (True, False):
                before_s = cpu_s(worker.broker_pid)
                name = f"round-{i}-{is_stuck:d}"
                round_ms = _gaps_ms(worker, num_clients, num_steps, is_stuck, name)
                work_s[is_stuck] += cpu_s(worker.broker_pid) - before_s
                p99_ms[is_stuck] = float(np.percentile(round_ms, 99))
                gaps_ms[is_stuck] += round_ms
            ratios.append(p99_ms[True] / p99_ms[False])
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    steps = ROUNDS * num_steps
    return {
        "clients": num_clients,
        "all_read_p50_ms": _percentile(gaps_ms[False], 50),
        "one_stuck_p50_ms": _percentile(gaps_ms[True], 50),
        "all_read_p99_ms": _percentile(gaps_ms[False], 99),
        "one_stuck_p99_ms": _percentile(gaps_ms[True], 99),
        "p99_ratio": round(float(middle), 3),
        "p99_ratio_quartile_1": round(float(low), 3),
        "p99_ratio_quartile_3": round(float(high), 3),
        "all_read_broker_us_per_step": round(1e6 * work_s[False] / steps),
        "one_stuck_broker_us_per_step": round(1e6 * work_s[True] / steps),
    }


def _percentile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 2)


def _first_tokens_ms(client: BenchClient, count: int, name: str) -> list[float]:
    first_ms = []
    for i in range(count):
        start_s = time.perf_counter()
        client.send(MessageType.SUBMIT, job=f"{name}-{i}", prompt=f"{i}", max_tokens=2)
        client.receive(MessageType.TOKENS)
        first_ms.append(1e3 * (time.perf_counter() - start_s))
        client.receive(MessageType.DONE)
    return first_ms


def _queued(client: BenchClient) -> int:
    client.send(MessageType.STATS)
    return int(client.receive(MessageType.STATS)["waiting"])


def _gaps_ms(
    worker: BusWorker, num_clients: int, num_tokens: int, stuck: bool, name: str
) -> list[float]:
    """Each client runs one job; a stuck first one reads nothing and grants no more credit."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [
        BenchClient(worker.endpoint, f"bench-client-{name}-{i:03}", "", context, stuck and not i)
        for i in range(num_clients)
    ]
    poller = zmq.Poller()
    for i, client in enumerate(clients):
        client.send(MessageType.SUBMIT, job=f"{name}-{i}", prompt=f"{i}", max_tokens=num_tokens)
        if i or not stuck:
            poller.register(client.socket, zmq.POLLIN)
    index_of = {client.socket: i for i, client in enumerate(clients)}
    last_s: dict[int, float] = {}
    gaps_ms: list[float] = []
    open_clients = set(range(1, num_clients))
    while open_clients:
        for socket, _ in poller.poll(20_000):
            message = decode(socket.recv_multipart())
            index = index_of[socket]
            if message.type is MessageType.PING:
                clients[index].send(MessageType.PONG, t=message.body["t"])
            elif message.type is MessageType.DONE:
                open_clients.discard(index)
            elif message.type is MessageType.TOKENS and index:
                now_s = time.perf_counter()
                if index in last_s:
                    gaps_ms.append(1e3 * (now_s - last_s[index]))
                last_s[index] = now_s
    for client in clients:
        client.close()
    context.term()
    return gaps_ms
