"""Commands in documents, as tests run them.

A fenced `sh`, `python`, `js` or `php` block is run as it stands, but for its addresses: the default
ports become those of the test's servers. A comment before a block says otherwise:

    <!-- not run here: REASON -->    left out
    <!-- run in the background -->   a worker: started, then awaited until it is ready
    <!-- saved as mine.c -->         written to this file, for a command after it
    <!-- needs: a, b/c -->           left out where a command, a path (with a slash) or one of
                                     `NEEDS` is missing; stands alone or behind one of the above
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNNABLE = {"sh": "", "python": "python", "js": "node", "php": "php"}
"""Languages that are run, with their interpreters."""

DOCUMENTS = {
    "README.md": ".",
    "docs/QUICKSTART.md": ".",
    "clients/shell/README.md": ".",
    "clients/python/README.md": ".",
    "clients/node/README.md": "clients/node",
    "clients/c/README.md": "clients/c",
}
"""Documents whose blocks are run, and the directory that their reader is in."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it begins, what it says, and the comment before it."""

    document: str
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def reason_not_run(self) -> str:
        """Why it is left out wherever it is tried; empty if it is run."""
        return self.note.partition("not run here: ")[2]

    @property
    def is_background(self) -> bool:
        """Whether it is a worker that keeps running."""
        return self.note == "run in the background"

    @property
    def file_name(self) -> str:
        """The file that it is saved as, if it is."""
        match = re.search(r"saved as (\S+?),?(?: |$)", self.note)
        return match[1] if match else ""

    @property
    def missing(self) -> list[str]:
        """What it needs and this machine lacks."""
        names = self.note.partition("needs: ")[2].split(", ") if "needs: " in self.note else []
        return [name for name in names if not is_there(name)]


def _succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    try:
        return not subprocess.run(command, cwd="/", capture_output=True, timeout=20).returncode
    except subprocess.TimeoutExpired:
        return False


def _has_node() -> bool:
    return _succeeds("node", "-e", "process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)")


def _has_node_packages() -> bool:
    """They are installed in this checkout, or the npm registry can be reached."""
    installed = (ROOT / "clients/node/node_modules/.bin/tsc").exists()
    return (
        _has_node() and shutil.which("npm") is not None and (installed or _succeeds("npm", "ping"))
    )


NEEDS: dict[str, Callable[[], bool]] = {
    "node 20": _has_node,
    "npm packages": _has_node_packages,
    "php-redis": lambda: _succeeds("php", "-r", 'exit(extension_loaded("redis") ? 0 : 1);'),
    "libzmq": lambda: _succeeds("pkg-config", "--exists", "libzmq"),
    "msgpack-c": lambda: (
        _succeeds("pkg-config", "--exists", "msgpack-c")
        or _succeeds("pkg-config", "--exists", "msgpack")
    ),
}
"""What a block can need besides commands and files."""


@cache
def is_there(name: str) -> bool:
    """Whether this machine has what a block needs."""
    if name in NEEDS:
        return NEEDS[name]()
    return (ROOT / name).exists() if "/" in name else shutil.which(name) is not None


def blocks_of(document: str) -> list[Block]:
    """All fenced blocks that have a language."""
    text = (ROOT / document).read_text()
    return [
        Block(
            document,
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["note"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def marker(block: Block) -> str:
    """The line that a script prints when a block has been run to its end."""
    return f"== {block} is done"


def script_of(document: str, addresses: Mapping[str, str], directory: Path) -> str:
    """One bash script with every block that can be run here; it stops at the first that fails.

    addresses: default address -> address of the test. directory: for files of the script.
    """
    parts = [_PRELUDE.format(directory=shlex.quote(str(directory)))]
    for block in blocks_of(document):
        if block.reason_not_run or block.missing:
            continue
        text = block.text
        for default, actual in addresses.items():
            text = text.replace(default, actual)
        parts += [_commands(block, text), f"printf '\\n%s\\n' {shlex.quote(marker(block))}\n"]
    return "".join(parts)


def _commands(block: Block, text: str) -> str:
    """What bash has to do for a block of this text."""
    if block.file_name:
        return f"cat >{shlex.quote(block.file_name)} <<'BLOCK'\n{text}BLOCK\n"
    if block.is_background:
        return f"start_worker <<'WORKER'\n{text}WORKER\n"
    if block.language == "sh":
        return text
    # Beside the document's other files: Node.js looks for packages from there.
    suffix = {"python": "py", "js": "mjs", "php": "php"}[block.language]
    file = f"block{block.line}.{suffix}"
    opening = "<?php\n" if block.language == "php" else ""
    interpreter = RUNNABLE[block.language]
    return f"cat >{file} <<'BLOCK'\n{opening}{text}BLOCK\n{interpreter} {file}\n"


# A worker is ready when its line says so; it must end with exit code 0 when it is told to stop.
_PRELUDE = """\
set -euo pipefail
workers=()
log={directory}/worker.log
start_worker() {{
    sed '1s/^/exec /' >{directory}/worker.sh
    bash {directory}/worker.sh >"$log" 2>&1 &
    workers+=($!)
    for _ in $(seq 600); do
        grep -q '^ready: ' "$log" && return
        kill -0 "$!" || {{ cat "$log"; return 1; }}
        sleep 0.1
    done
    cat "$log"
    return 1
}}
stop_workers() {{
    local code=$?
    for pid in "${{workers[@]}}"; do
        kill "$pid"
        wait "$pid" || {{ echo "worker: exit code $?"; cat "$log"; code=1; }}
    done
    exit "$code"
}}
trap stop_workers EXIT
"""
