"""The version stands in one place; whatever must repeat it says the same."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from tests.docs_kit import ROOT
from tokenbus import __version__


@pytest.mark.parametrize("file", ["pyproject.toml", "clients/python/pyproject.toml"])
def test_python_packages_take_their_version_from_the_client(file: str) -> None:
    project = tomllib.loads((ROOT / file).read_text())
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / file).parent / project["tool"]["hatch"]["version"]["path"]
    assert source == ROOT / "clients/python/tokenbus/_version.py"


def test_the_other_clients_have_the_same_version() -> None:
    node = json.loads((ROOT / "clients/node/package.json").read_text())["version"]
    makefile = (ROOT / "clients/c/Makefile").read_text()
    cmake = (ROOT / "clients/c/CMakeLists.txt").read_text()
    header = (ROOT / "clients/c/include/tokenbus.h").read_text()
    in_make = re.search(r"^VERSION := (\S+)$", makefile, re.M)
    in_cmake = re.search(r"VERSION (\d+\.\d+\.\d+)", cmake)
    in_header = re.search(r'^#define TB_VERSION "(.+)"$', header, re.M)
    found = [match[1] for match in (in_make, in_cmake, in_header) if match is not None]
    assert [node, *found] == [__version__] * 4
