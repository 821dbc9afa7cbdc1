"""How torch's worker threads wait, decided before torch is imported.

A decode step on the CPU is some hundred short parallel sections. By default GNU OpenMP's threads
spin for milliseconds between and inside them. Where another process wants a core (the broker has
work after every step), a spinning thread keeps the one it waits for from running: on two cores with
other load a step of 19 ms took 780. Threads that sleep cost some microseconds a section instead.
"""

from __future__ import annotations

import os


def set_thread_waiting() -> None:
    """Let OpenMP threads sleep while they wait, unless the environment says how they wait.

    Has an effect only before the first import of torch in this process.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
