"""Commands in documents, as tests run them.

A fenced `sh` or `python` block is run as it stands, but for its addresses: the default ports become
those of the test's servers. A comment before a block says otherwise:

    <!-- not run here: REASON -->    left out
    <!-- run in the background -->   a worker: started, then awaited until it is ready
    <!-- needs: a, b/c -->           left out where a command (or a path, with a slash) is missing
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNNABLE = ("sh", "python")

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it begins, what it says, and the comment before it."""

    line: int
    language: str
    text: str
    note: str

    @property
    def reason_not_run(self) -> str:
        """Why it is left out; empty if it is run."""
        return self.note.partition("not run here: ")[2]

    @property
    def is_background(self) -> bool:
        """Whether it is a worker that keeps running."""
        return self.note == "run in the background"

    @property
    def missing(self) -> list[str]:
        """What it needs and this machine lacks."""
        names = self.note.partition("needs: ")[2].split(", ") if "needs: " in self.note else []
        return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    return (ROOT / name).exists() if "/" in name else shutil.which(name) is not None


def blocks_of(document: str) -> list[Block]:
    """All fenced blocks that have a language."""
    text = (ROOT / document).read_text()
    return [
        Block(
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["note"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def script_of(document: str, addresses: Mapping[str, str], directory: Path) -> str:
    """One bash script with every runnable block, which stops at the first that fails.

    addresses: default address -> address of the test. directory: for files of the script.
    """
    parts = [_PRELUDE.format(directory=shlex.quote(str(directory)))]
    for block in blocks_of(document):
        if block.language not in RUNNABLE or block.reason_not_run or block.missing:
            continue
        text = block.text
        for default, actual in addresses.items():
            text = text.replace(default, actual)
        parts.append(f"echo {shlex.quote(f'== {document}:{block.line}')}\n")
        if block.language == "python":
            file = directory / f"line{block.line}.py"
            file.write_text(text)
            parts.append(f"python {shlex.quote(str(file))}\n")
        elif block.is_background:
            parts.append(f"start_worker <<'WORKER'\n{text}WORKER\n")
        else:
            parts.append(text)
    return "".join(parts)


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
