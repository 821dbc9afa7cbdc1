"""The two wheels, installed where nothing of this checkout is: `tokenbus serve` runs, and a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs_kit import ROOT

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both, built offline."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(directory)]
    subprocess.run([*command, str(ROOT), str(ROOT / "clients/python")], check=True)
    return sorted(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the two wheels. What they require is found in the one of the tests: a
    path in a .pth file, whose own .pth files (the checkout among them) are not followed."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True, with_pip=True)
    python = directory / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *wheels]
    subprocess.run(command, check=True)
    site = next(directory.glob("lib/python*/site-packages"))
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory


def test_the_client_wheel_holds_the_client_alone_and_the_worker_wheel_the_rest(
    wheels: list[Path],
) -> None:
    tops = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        folders = {name.split("/")[0] for name in names}
        tops[wheel.name.split("-")[0]] = {top for top in folders if ".dist-info" not in top}
        assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    assert tops == {
        "tokenbus_client": {"tokenbus"},
        "tokenbus": {"broker", "engine", "kernels", "ops"},
    }


def test_a_worker_from_the_wheels_runs_a_job_over_both_doors(
    environment: Path, tmp_path: Path
) -> None:
    tokenbus = str(environment / "bin" / "tokenbus")
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet |= {"TOKENBUS_DATA_DIR": str(tmp_path / "data"), "HOME": str(tmp_path)}
    serve = [tokenbus, "serve", "--json", "--model", "fake", "--zmq", "tcp://127.0.0.1:0"]
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            serve, cwd=tmp_path, env=quiet, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert worker.stdout is not None
        ready = json.loads(worker.stdout.readline() or "{}")
        assert ready.get("event") == "ready", (tmp_path / "worker.log").read_text()[-2000:]
        for command in (["ask", "--max-tokens", "8"], ["submit", "-f", "--max-tokens", "8"]):
            done = subprocess.run(
                [tokenbus, *command, "Hello"],
                cwd=tmp_path,
                env=quiet,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)
    assert worker.returncode == 0
