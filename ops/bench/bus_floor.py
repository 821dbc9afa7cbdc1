"""What a message takes through ZeroMQ alone, without any of our code: the floor under the bus."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import zmq

ANSWER_MS = 20_000

# Two ROUTERs that send back what comes: one blocks in its receive; one is watched by uvloop through
# its descriptor, as the worker's is. The first line they print is their endpoint.
BLOCKING = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print(socket.last_endpoint.decode(), flush=True)
while True:
    socket.send_multipart(socket.recv_multipart())
"""
ON_A_LOOP = """
import asyncio, sys, uvloop, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print(socket.last_endpoint.decode(), flush=True)
def turn():
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        socket.send_multipart(socket.recv_multipart())
async def main():
    asyncio.get_running_loop().add_reader(socket.getsockopt(zmq.FD), turn)
    turn()
    await asyncio.Event().wait()
uvloop.run(main())
"""


def measure_floors(num_messages: int) -> dict[str, float]:
    """Half the round trip to a ROUTER in another process, for one way. Microseconds."""
    return {
        **_measure("zmq_floor", BLOCKING, "ipc://*", num_messages),
        **_measure("zmq_floor_loop", ON_A_LOOP, "ipc://*", num_messages),
        **_measure("zmq_floor_loop_tcp", ON_A_LOOP, "tcp://127.0.0.1:*", num_messages),
    }


def _measure(name: str, script: str, where: str, num_messages: int) -> dict[str, float]:
    half_us = []
    argv = [sys.executable, "-c", script, where]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as echo:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = ANSWER_MS
        try:
            if echo.stdout is None:
                raise RuntimeError("the echo has no output")
            socket.connect(echo.stdout.readline().strip())
            for _ in range(num_messages):
                start_ns = time.perf_counter_ns()
                socket.send(bytes(64))
                socket.recv()
                half_us.append((time.perf_counter_ns() - start_ns) / 2e3)
        finally:
            socket.close()
            context.term()
            echo.kill()
    return percentiles(name, half_us)


def percentiles(name: str, values_us: list[float]) -> dict[str, float]:
    """The tenth percentile is what the machine does when nothing else runs on it."""
    warm = values_us[len(values_us) // 10 :]
    values = np.percentile(warm, (10, 50, 99))
    names = (f"{name}_p10_us", f"{name}_p50_us", f"{name}_p99_us")
    return {name: round(float(us), 1) for name, us in zip(names, values, strict=True)}
