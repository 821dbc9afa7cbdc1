"""Who may import whom. The arrows keep the broker free of torch, the client light and the kernels
usable alone; this test reads every import statement and fails on any arrow that is not listed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kernels": ROOT / "kernels",
    "engine": ROOT / "engine",
    "broker": ROOT / "broker",
    "ops": ROOT / "ops",
    "tokenbus": ROOT / "clients" / "python" / "tokenbus",
}
STDLIB = frozenset(sys.stdlib_module_names)

# Prefixes of modules that each package may import, besides itself and the standard library.
ALLOWED = {
    "kernels": {"torch", "triton", "numpy"},
    "engine": {
        "kernels",
        "broker.ring",
        "broker.log",
        "numpy",
        "torch",
        "safetensors",
        "gguf",
        "structlog",
    },
    "broker": {
        "tokenbus",
        "numpy",
        "zmq",
        "msgpack",
        "redis",
        "hiredis",
        "uvloop",
        "structlog",
        "jinja2",
        "tokenizers",
        "gguf",
        "prometheus_client",
    },
    "tokenbus": {"zmq", "msgpack", "redis"},
}


def imports_of(path: Path, root: Path, name: str) -> Iterator[tuple[int, str]]:
    """(line, full module name) of each import in the file; relative ones are resolved."""
    package = [name, *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from broker import ring` imports broker.ring
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def is_allowed(module: str, package: str) -> bool:
    top = module.split(".")[0]
    if top == package or top in STDLIB or top == "__future__":
        return True
    return any(module == p or module.startswith(f"{p}.") for p in ALLOWED[package])


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_every_import_follows_an_arrow(package: str) -> None:
    root = PACKAGES[package]
    files = sorted(root.rglob("*.py"))
    assert files, f"{root} has no Python files"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {package} must not import {module}"
        for path in files
        for line, module in imports_of(path, root, package)
        if not is_allowed(module, package)
    ]
    assert wrong == []


def test_nothing_but_ops_and_the_tests_imports_ops() -> None:
    """`bench/` is a folder of scripts and may."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for name, root in PACKAGES.items()
        if name != "ops"
        for path in root.rglob("*.py")
        for line, module in imports_of(path, root, name)
        if module.split(".")[0] == "ops"
    ]
    assert wrong == []


def test_a_wrong_arrow_is_seen(tmp_path: Path) -> None:
    """The reader itself: plain, dotted, from and relative imports."""
    package = tmp_path / "engine"
    (package / "sub").mkdir(parents=True)
    file = package / "sub" / "module.py"
    file.write_text(
        "import redis.asyncio\nfrom broker import streams\nfrom ..loop import step\n"
        "from broker.ring import records\nimport os.path\n"
    )
    found = list(imports_of(file, package, "engine"))
    assert [module for _, module in found if not is_allowed(module, "engine")] == [
        "redis.asyncio",
        "broker.streams",
    ]
    assert (3, "engine.loop.step") in found
