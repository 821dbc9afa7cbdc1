"""The table of faults names tests that exist, and every chaos test stands in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAOS = ROOT / "tests" / "chaos"
KIT_TESTS = "test_chaos_kit_"  # tests of the kit itself hold no fault
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (CHAOS / "README.md").read_text())


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    return set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def test_every_test_that_the_table_names_exists() -> None:
    assert len(NAMED) > 40
    missing = [f"{file}::{name}" for file, name in NAMED if name not in names_in(ROOT / file)]
    assert missing == []


def test_every_chaos_test_stands_in_the_table() -> None:
    files = [path for path in CHAOS.glob("test_*.py") if not path.name.startswith(KIT_TESTS)]
    written = {(f"tests/chaos/{path.name}", name) for path in files for name in names_in(path)}
    assert sorted(written - set(NAMED)) == []
