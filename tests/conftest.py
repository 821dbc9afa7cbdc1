"""Settings for every test, made before any test module is imported; and the order in which test
processes that run side by side take the tests.
"""

from __future__ import annotations

import os
import shutil

import pytest

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by `LONG_FIRST`. Tests of one file that share a fixture (a build, a model, a worker)
    stay together in one process (`--dist loadgroup`); others go wherever there is room.
    """
    items.sort(key=_rank)
    for item in items:
        if _shares_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _rank(item: pytest.Item) -> int:
    ranks = (rank for rank, start in enumerate(LONG_FIRST) if item.nodeid.startswith(start))
    return next(ranks, len(LONG_FIRST))


def _shares_fixtures(item: pytest.Item) -> bool:
    """Whether it takes a fixture of its file's that is made once for all of them."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info is not None else ()
    return any(
        fixture.scope == "module" and fixture.baseid.startswith("tests")
        for fixtures in definitions
        for fixture in fixtures
    )
