"""The broker's configuration: nothing is accepted and ignored."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from broker import config

BROKER = Path(config.__file__).parent
SOURCE = "\n".join(path.read_text() for path in BROKER.rglob("*.py") if path.name != "config.py")
SETTINGS = [
    (name, field.name)
    for name, section in vars(config).items()
    if is_dataclass(section) and isinstance(section, type)
    for field in fields(section)
]


@pytest.mark.parametrize(("section", "name"), SETTINGS)
def test_every_setting_is_read_somewhere(section: str, name: str) -> None:
    assert re.search(rf"\.{name}\b", SOURCE), f"{section}.{name}"
