"""Shell completion: what `--install-completion` writes makes bash complete commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETE = r"""
source "$HOME/.bashrc"
COMP_WORDS=(tokenbus {words}) COMP_CWORD={count}
"$(complete -p tokenbus | sed -E 's/.*-F ([^ ]+) .*/\1/')" tokenbus
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose .bashrc has the completion, as the command installed it."""
    command = tmp_path / "bin" / "tokenbus"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom ops.cli import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    run(tmp_path, "tokenbus --install-completion; true")  # `; true`: bash must stay its parent
    return tmp_path


def run(home: Path, script: str) -> str:
    environment = {
        **os.environ,
        "HOME": str(home),
        "SHELL": "/bin/bash",
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("se", {"serve"}),
        ("dead re", {"requeue"}),
        ("submit --pri", {"--priority"}),
    ],
)
def test_bash_completes_commands_and_options(home: Path, words: str, expected: set[str]) -> None:
    script = COMPLETE.format(words=words, count=len(words.split()))
    assert set(run(home, script).split()) == expected
