"""The ZeroMQ part of the bus benchmark: latency of both directions, token events and jobs a second,
memory of open streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from broker.ring.records import (
    Finish,
    Kind,
    StepEvents,
    encode_step,
)
from ops.bench.bus_floor import measure_floors, percentiles
from ops.bench.bus_worker import VOCAB_SIZE, BenchEngine, BusWorker, cpu_s, rss_bytes
from tokenbus.parts import WAIT, receive_parts, send_parts
from tokenbus.protocol import MessageType, decode, encode_trusted

ANSWER_MS = 20_000


class BenchClient:
    """A DEALER, with as good as unlimited credit; blocks. context: shared by many clients, or its
    own. is_stuck: it will grant no more credit, and its socket holds next to nothing.
    """

    def __init__(
        self,
        endpoint: str,
        name: str = "bench-client-0000000",
        tenant: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        is_stuck: bool = False,
    ) -> None:
        self._own = None if context else zmq.Context()
        self.socket = (context or self._own or zmq.Context()).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1 if is_stuck else 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.socket.connect(endpoint)
        about = {"tenant": tenant} if tenant else {}
        self.send(MessageType.HELLO, client=name, credit=64 if is_stuck else 1 << 40, **about)
        self.receive(MessageType.WELCOME)

    def send(self, kind: MessageType, **body: object) -> None:
        """One message."""
        send_parts(self.socket, encode_trusted(kind, body), WAIT)

    def receive(self, kind: MessageType) -> dict[str, Any]:
        """The next message of this type; others are passed over."""
        for got, body in self.messages():
            if got is kind:
                return body
        raise RuntimeError("unreachable: messages() does not end")

    def messages(self) -> Iterator[tuple[MessageType, dict[str, Any]]]:
        """Everything that comes; PINGs are answered."""
        while True:
            message = decode(receive_parts(self.socket, WAIT))
            if message.type is MessageType.PING:
                self.send(MessageType.PONG, t=message.body["t"])
            else:
                yield message.type, message.body

    def close(self) -> None:
        """Free the socket."""
        self.socket.close()
        if self._own is not None:
            self._own.term()


def measure_latency(num_jobs: int, pause_s: float = 0.0) -> dict[str, float]:
    """One job at a time on an idle worker; the benchmark plays the engine, on the same clock.
    pause_s: of silence before each job.

    submit: from the client's send to the SUBMIT record in the engine's hand. token: from the STEP
    record's write to TOKENS in the client's hand. Microseconds, beside ZeroMQ's own.
    """
    submit_us, token_us = [], []
    with BusWorker() as worker, BenchEngine(worker.link_path) as engine:
        worker.wait_for("ready")
        client = BenchClient(worker.endpoint)
        for i in range(num_jobs):
            if pause_s:
                time.sleep(pause_s)
            start_ns = time.perf_counter_ns()
            client.send(MessageType.SUBMIT, job=f"job-{i}", prompt="hello world", max_tokens=1)
            rid, _ = engine.await_submit()
            seen_ns = time.perf_counter_ns()
            client.receive(MessageType.ACCEPTED)
            record = encode_step(one_token(i, rid))
            write_ns = time.perf_counter_ns()
            engine.write(Kind.STEP, record)
            client.receive(MessageType.TOKENS)
            got_ns = time.perf_counter_ns()
            client.receive(MessageType.DONE)
            submit_us.append((seen_ns - start_ns) / 1e3)
            token_us.append((got_ns - write_ns) / 1e3)
        client.close()
    return {
        **percentiles("submit", submit_us),
        **percentiles("token", token_us),
        **measure_floors(num_jobs),
    }


def measure_events(num_jobs: int, num_tokens: int) -> dict[str, float]:
    """All jobs at once, one client, the real engine with the fake model at full speed."""
    with BusWorker() as worker:
        worker.start_engine(max_num_seqs=num_jobs)
        client = BenchClient(worker.endpoint)
        broker_s, engine_s = cpu_s(worker.broker_pid), cpu_s(worker.engine_pid)
        for i in range(num_jobs):
            client.send(MessageType.SUBMIT, job=f"job-{i}", prompt=f"{i}", max_tokens=num_tokens)
        tokens = messages = ended = 0
        first_s = last_s = 0.0
        for kind, body in client.messages():
            if kind is MessageType.TOKENS:
                first_s = first_s or time.perf_counter()
                messages += 1
                tokens += sum(len(event[3]) for event in body["events"])
            elif kind is MessageType.DONE:
                ended += 1
                if ended == num_jobs:
                    last_s = time.perf_counter()
                    break
        broker_s, engine_s = (
            cpu_s(worker.broker_pid) - broker_s,
            cpu_s(worker.engine_pid) - engine_s,
        )
        client.close()
    return {
        "tokens": tokens,
        "messages": messages,
        "tokens_per_s": round(tokens / (last_s - first_s)),
        "broker_us_per_token": round(1e6 * broker_s / tokens, 2),
        "engine_us_per_token": round(1e6 * engine_s / tokens, 2),
    }


def measure_jobs(num_jobs: int, window: int) -> dict[str, float]:
    """One-token jobs, `window` of them open at a time."""
    with BusWorker() as worker:
        worker.start_engine(max_num_seqs=256)
        client = BenchClient(worker.endpoint)
        broker_s, engine_s = cpu_s(worker.broker_pid), cpu_s(worker.engine_pid)
        start_s = time.perf_counter()
        sent = ended = 0
        while sent < min(window, num_jobs):
            client.send(MessageType.SUBMIT, job=f"job-{sent}", prompt="hello", max_tokens=1)
            sent += 1
        for kind, _ in client.messages():
            if kind is not MessageType.DONE:
                continue
            ended += 1
            if sent < num_jobs:
                client.send(MessageType.SUBMIT, job=f"job-{sent}", prompt="hello", max_tokens=1)
                sent += 1
            if ended == num_jobs:
                break
        elapsed_s = time.perf_counter() - start_s
        broker_s, engine_s = (
            cpu_s(worker.broker_pid) - broker_s,
            cpu_s(worker.engine_pid) - engine_s,
        )
        client.close()
    return {
        "jobs": num_jobs,
        "jobs_per_s": round(num_jobs / elapsed_s),
        "broker_us_per_job": round(1e6 * broker_s / num_jobs),
        "engine_us_per_job": round(1e6 * engine_s / num_jobs),
    }


def measure_open_streams(num_streams: int) -> dict[str, float]:
    """Streams that all run at once; memory of the broker for each, when each has had a token."""
    with BusWorker(max_queued=num_streams) as worker:
        worker.start_engine(max_num_seqs=num_streams, step_ms=500.0)
        client = BenchClient(worker.endpoint)
        before_bytes = rss_bytes(worker.broker_pid)
        start_s = time.perf_counter()
        for i in range(num_streams):
            client.send(MessageType.SUBMIT, job=f"job-{i}", prompt=f"{i}", max_tokens=1_000)
        waiting = {f"job-{i}" for i in range(num_streams)}
        for kind, body in client.messages():
            if kind is MessageType.TOKENS:
                waiting.difference_update(event[0] for event in body["events"])
                if not waiting:
                    break
        elapsed_s = time.perf_counter() - start_s
        after_bytes = rss_bytes(worker.broker_pid)
        client.close()
    return {
        "streams": num_streams,
        "all_streaming_after_s": round(elapsed_s, 2),
        "broker_bytes_per_stream": round((after_bytes - before_bytes) / num_streams),
    }


def one_token(step_id: int, rid: int) -> StepEvents:
    return StepEvents(
        step_id=step_id,
        time_ns=time.monotonic_ns(),
        rids=np.array([rid], np.uint64),
        token_ids=np.array([step_id % VOCAB_SIZE], np.int32),
        finish=np.array([Finish.LENGTH], np.uint8),
        started_rids=np.array([], np.uint64),
        cached_tokens=np.array([], np.int32),
    )
