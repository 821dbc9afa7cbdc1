"""The documentation agrees with the code: tables, paths, and what the README says to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ops.docs_tables import ROOT, TABLES, first_sentence, updated

DOCUMENTS = [
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "clients/*/README.md", "kernels/README.md")
    for path in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("name", TABLES)
def test_tables_made_from_the_code_are_fresh(name: str) -> None:
    """Mend it with `python -m ops.docs_tables`."""
    text = (ROOT / TABLES[name][0]).read_text()
    assert updated(name, text) == text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:broker|engine|kernels|ops|clients|tests|docs|bench)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(
    "path",
    [p for folder in ("broker", "engine", "kernels", "ops") for p in (ROOT / folder).rglob("*.py")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_module_says_what_it_is(path: Path) -> None:
    is_empty = not path.read_text().strip()
    assert is_empty or first_sentence(path)


def test_the_first_sentence_ends_at_its_full_stop(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text('"""Reads a file of 0.5 MB, `x.py`. Then more.\n\nRest."""\n')
    assert first_sentence(file) == "Reads a file of 0.5 MB, `x.py`"
