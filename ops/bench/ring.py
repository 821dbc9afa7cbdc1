"""Our ring beside pyzmq ipc and multiprocessing.Queue: latency and rate between two processes.

The three run in turns within one call, so that whatever else the machine does hits all of them.
Each exchanges messages of 64 bytes with one other process:

- round trip: one message there and back, both sides waiting in the way that is fastest for them
  (ring: a short spin, then asleep; zmq and Queue: a blocking receive). `ring_sleeping` is our
  ring without the spin: both sides sleep on their eventfds between messages. Spinning only makes
  sense with a core each, so `ring` keeps its sides off each other's CPU; the rest runs as it likes.
- one way: the sender puts a monotonic time into each message and paces itself.
- rate: as many messages one way as the receiver takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import zmq
from rich.console import Console
from rich.table import Table

from broker.ring.link import LinkListener
from ops.bench.ring_peer import (
    COUNT_WORD,
    ECHO,
    FILL,
    MESSAGE_BYTES,
    STOP_WORD,
    Channel,
    QueueChannel,
    RingChannel,
    ZmqChannel,
    message_of,
    percentile,
    serve_queue,
    serve_ring,
    serve_zmq,
)

RING_BYTES: Final = 1 << 20
ONE_WAY_PAUSE_NS: Final = 50_000
CHANNELS: Final = ("ring", "ring_sleeping", "zmq_ipc", "mp_queue")
#: How long a side of `ring` spins before it sleeps; `ring_sleeping` does not spin.
SPIN_S: Final = 50e-6


@contextmanager
def _process(context: SpawnContext, target: Any, *args: Any) -> Iterator[BaseProcess]:
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
        process.join(10)
    finally:
        process.kill()
        process.join()


@contextmanager
def _channel(name: str, folder: Path) -> Iterator[Channel]:
    """One side of a channel whose other side another process serves."""
    spawn = multiprocessing.get_context("spawn")
    if name.startswith("ring"):
        spin_s = SPIN_S if name == "ring" else 0.0
        cpus = os.sched_getaffinity(0)
        near, far = (set(sorted(cpus)[:1]), cpus - {min(cpus)} or cpus) if spin_s else (cpus, cpus)
        listener = LinkListener(folder / name, RING_BYTES)
        os.sched_setaffinity(0, near)
        try:
            with (
                _process(spawn, serve_ring, str(listener.path), spin_s, far),
                listener.accept(30.0) as link,
            ):
                yield RingChannel(link, False, spin_s)
        finally:
            os.sched_setaffinity(0, cpus)
            listener.close()
    elif name == "zmq_ipc":
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.bind(f"ipc://{folder}/zmq")
            with _process(spawn, serve_zmq, f"ipc://{folder}/zmq"):
                yield ZmqChannel(sock)
    else:
        there, back = spawn.Queue(), spawn.Queue()
        with _process(spawn, serve_queue, there, back):
            yield QueueChannel(there, back)


def measure(channel: Channel, seconds: float) -> dict[str, float]:
    """Round trip, rate and one-way delay over one channel, a third of the time each.

    Returns rtt_us.p50, rtt_us.p99, one_way_us.p50, one_way_us.p99, records_per_s.
    """
    channel.send(ECHO)
    channel.receive()  # the other process is up
    round_trips_ns = _round_trips(channel, seconds / 3)
    records_per_s = _rate(channel, seconds / 3)
    _send_timed(channel, seconds / 3)
    channel.send(message_of(STOP_WORD))
    one_way_p50_ns, one_way_p99_ns = json.loads(channel.receive()[0])
    return {
        "rtt_us.p50": round(percentile(round_trips_ns, 50) / 1e3, 2),
        "rtt_us.p99": round(percentile(round_trips_ns, 99) / 1e3, 2),
        "one_way_us.p50": round(one_way_p50_ns / 1e3, 2),
        "one_way_us.p99": round(one_way_p99_ns / 1e3, 2),
        "records_per_s": round(records_per_s),
    }


def _round_trips(channel: Channel, seconds: float) -> list[int]:
    """Sorted round-trip times in ns, one message at a time."""
    samples: list[int] = []
    end_ns = time.perf_counter_ns() + int(seconds * 1e9)
    while (start_ns := time.perf_counter_ns()) < end_ns:
        channel.send(ECHO)
        channel.receive()
        samples.append(time.perf_counter_ns() - start_ns)
    samples.sort()
    return samples


def _rate(channel: Channel, seconds: float) -> float:
    """Messages the receiver took per second, in rounds of 10,000 with one answer each."""
    send, fill, ask = channel.send, FILL, message_of(COUNT_WORD)
    count = 0
    start_s = now_s = time.perf_counter()
    while now_s - start_s < seconds:
        for _ in range(10_000):
            send(fill)
        send(ask)
        count += int.from_bytes(channel.receive()[0], "little")
        now_s = time.perf_counter()
    return count / (now_s - start_s)


def _send_timed(channel: Channel, seconds: float) -> None:
    """Messages with their send time, one every ONE_WAY_PAUSE_NS."""
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    next_ns = time.monotonic_ns()
    while (now_ns := time.monotonic_ns()) < end_ns:
        if now_ns >= next_ns:
            channel.send(message_of(time.monotonic_ns()))
            next_ns = now_ns + ONE_WAY_PAUSE_NS


def run(seconds: float) -> dict[str, Any]:
    """Measure all channels, about `seconds` in all besides starting the processes.

    Returns one flat mapping: `ring.rtt_us.p50`, `zmq_ipc.records_per_s`, and so on; `load_1m` is
    the machine's load average at the end, to judge the figures by.
    """
    result: dict[str, Any] = {"bench": "ring", "message_bytes": MESSAGE_BYTES}
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        for name in CHANNELS:
            with _channel(name, Path(folder)) as channel:
                figures = measure(channel, seconds / len(CHANNELS))
            result |= {f"{name}.{key}": value for key, value in figures.items()}
    result["load_1m"] = round(os.getloadavg()[0], 2)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """The result as a table, one row a channel."""
    table = Table(title=f"{result['message_bytes']}-byte messages between two processes")
    table.add_column("channel")
    for heading in ("there and back\np50, µs", "\np99", "one way\np50, µs", "\np99", "\nrecords/s"):
        table.add_column(heading, justify="right")
    for name in CHANNELS:
        times = [
            f"{result[f'{name}.{key}']:,.1f}"
            for key in ("rtt_us.p50", "rtt_us.p99", "one_way_us.p50", "one_way_us.p99")
        ]
        table.add_row(name, *times, f"{result[f'{name}.records_per_s']:,}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ops.bench.ring [--seconds S]`: a table, then one JSON line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--seconds", type=float, default=8.0, help="measuring time in all")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args(argv)
    result = run(options.seconds)
    if not options.json:
        show(result, Console())
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
