"""Settings for every test, made before any test module is imported; and the order in which test
processes that run side by side take the tests.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]

# Triton reads this when a kernel is decorated: it must be set before the first import of kernels.
if shutil.which("nvidia-smi") is None and not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONG_FIRST = (
    "tests/integration/test_cpu_parity.py",
    "tests/integration/test_three_clients.py",
    "tests/chaos/",
    "tests/integration/test_worker_",
    "tests/integration/",
    "tests/kernels/",
)
"""What takes long is begun first, so that at the end many short tests fill both processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by `LONG_FIRST`."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    ranks = (rank for rank, start in enumerate(LONG_FIRST) if item.nodeid.startswith(start))
    return next(ranks, len(LONG_FIRST))


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of a file that makes something once for all of them (a build, a model, a worker) stay
    together in one process; others go wherever there is room, each for itself.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _is_shared(path) else nodeid


@cache
def _is_shared(path: str) -> bool:
    return 'scope="module"' in (ROOT / path).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    """How tests are given to processes, whatever `--dist` says."""
    return Spread(config, log)
