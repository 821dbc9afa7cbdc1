"""One wheel from the package index, by the running interpreter's pip, with progress in bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.2  # how often progress is looked at


class WheelUnavailable(Exception):
    """pip could not download the wheel; the text is its last word."""


def download_wheel(
    requirement: str, directory: Path, size_bytes: int, progress: Callable[[int, int], None] | None
) -> Path:
    """Download exactly this requirement, without its dependencies, and return the wheel's path.

    directory: emptied first, holds the wheel afterwards. size_bytes: what the wheel weighs, for
    the progress calls. Raises WheelUnavailable.
    """
    shutil.rmtree(directory, ignore_errors=True)
    staging = directory / "staging"
    staging.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--dest", str(directory), requirement]
    # pip keeps the bytes so far in its temporary directory: its size is the progress.
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(staging)},
    )
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress(min(_size_of(staging), size_bytes), size_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(staging, ignore_errors=True)
    if process.returncode != 0:
        raise WheelUnavailable(_last_error(errors))
    if progress is not None:
        progress(size_bytes, size_bytes)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelUnavailable(f"pip left {len(wheels)} wheels, expected 1")
    return wheels[0]


def _size_of(directory: Path) -> int:
    """Bytes in the directory's *.whl files; files may vanish while we look."""
    total = 0
    for path in directory.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _last_error(text: str) -> str:
    """The last ERROR line of pip's output, without its prefix."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
