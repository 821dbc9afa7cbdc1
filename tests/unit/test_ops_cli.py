"""The command line as a user types it: help, exit codes, JSON; without a worker."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ops.cli import address
from ops.cli.app import app
from ops.cli.job_options import PromptOptions, SamplingOptions
from ops.cli.options import nested, with_assignments
from ops.exit_codes import MEANINGS, CommandError, ExitCode
from ops.keyfiles import generate
from ops.settings import load

COMMANDS = [
    "serve", "broker", "engine", "ask", "chat", "submit", "tail", "cancel", "status", "dead",
    "model", "bench", "doctor", "keys",
]  # fmt: skip


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args, env={"COLUMNS": "120"}, catch_exceptions=False)
    return result.output


def test_help_lists_every_command_and_every_exit_code() -> None:
    text = run("--help")
    assert [name for name in COMMANDS if f" {name} " not in text] == []
    assert [code for code in ExitCode if f"{int(code)}: {MEANINGS[code]}" not in text] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("dead", "model", "bench")])
def test_each_command_has_an_example_in_its_help(command: str) -> None:
    assert "Example" in run(command, "--help")


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_help_needs_none_of_the_heavy_packages() -> None:
    """What makes `tokenbus --help` quick, without a stop-watch."""
    script = (
        "import sys; sys.argv = ['tokenbus', '--help']\n"
        "from ops.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'zmq', 'redis', 'pydantic', 'huggingface_hub', 'structlog'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout.splitlines()[-1] == "loaded: []"


def tokenbus(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from ops.cli import main; main()", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def test_a_bad_setting_ends_with_its_code_and_a_sentence(tmp_path: Path) -> None:
    result = tokenbus("serve", "--zmq", "nonsense", cwd=tmp_path)
    assert result.returncode == ExitCode.BAD_SETTING
    assert result.stderr.startswith("error: zmq = 'nonsense' (flag --zmq): use tcp://")
    assert "Traceback" not in result.stderr


def test_a_data_directory_that_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = tokenbus("serve", "--model", "fake", "--data-dir", "/dev/null/x", cwd=tmp_path)
    assert result.returncode == ExitCode.BAD_SETTING
    assert result.stderr.startswith("error: data_dir = /dev/null/x: ")


def test_an_error_is_json_for_programs(tmp_path: Path) -> None:
    result = tokenbus("model", "inspect", "absent.gguf", "--json", cwd=tmp_path)
    assert result.returncode == ExitCode.MODEL_UNAVAILABLE
    error = json.loads(result.stdout)
    assert error["exit_code"] == 4
    assert "absent.gguf" in error["error"]


def test_no_worker_and_no_redis_is_said_in_words(tmp_path: Path) -> None:
    result = tokenbus("status", "job-1", "--data-dir", str(tmp_path), cwd=tmp_path)
    assert result.returncode == ExitCode.BUS_UNAVAILABLE
    assert "Start `tokenbus serve`, or give --redis" in result.stderr


def test_nobody_at_the_default_endpoint_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "is_refused", lambda _: True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"nobody listens at tcp://127\.0\.0\.1:5555") as caught:
        address.zmq_address(load({"data_dir": tmp_path}))
    assert caught.value.code is ExitCode.BUS_UNAVAILABLE
    assert address.zmq_address(load({"zmq": "tcp://host:1"})) == "tcp://host:1"


def test_only_a_port_without_a_listener_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert address.is_refused(endpoint)
        listener.listen()
        assert not address.is_refused(endpoint)
    assert not address.is_refused("ipc:///somewhere")


@pytest.mark.parametrize("command", [("ask", "hello"), ("submit", "hello")])
def test_every_sampling_option_becomes_its_field(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    fields = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    given: dict[str, object] = {}
    fields_of = SamplingOptions.fields

    def note(options: SamplingOptions) -> None:
        given.update(fields_of(options))
        raise typer.Exit

    monkeypatch.setattr(SamplingOptions, "fields", note)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    run(*command, *flags, "--stop", "a", "--stop", "b")
    assert given == {**fields, "stop": ["a", "b"]}


def test_options_that_are_not_given_are_no_fields_and_zeros_are() -> None:
    assert SamplingOptions().fields() == {}
    assert SamplingOptions(temperature=0.0, seed=0).fields() == {"temperature": 0.0, "seed": 0}


def test_a_plain_continuation_is_a_prompt_and_anything_else_a_conversation() -> None:
    assert PromptOptions("a", raw=True).fields() == {"prompt": "a"}
    user = {"role": "user", "content": "a"}
    system = {"role": "system", "content": "b"}
    assert PromptOptions("a").fields() == {"messages": [user]}
    assert PromptOptions("a", system="b").fields() == {"messages": [system, user]}
    with pytest.raises(typer.BadParameter):
        PromptOptions("a", system="b", raw=True).fields()


def test_assignments_become_a_tree() -> None:
    tree = nested(["engine.dtype=float32", "engine.num_threads=2", "queue=a=b"])
    assert tree == {"engine": {"dtype": "float32", "num_threads": "2"}, "queue": "a=b"}


def test_a_flag_beats_an_assignment_and_an_absent_flag_does_not() -> None:
    tree = with_assignments(["device=cuda", "queue=a"], device=None, queue="b")
    assert tree == {"device": "cuda", "queue": "b"}


@pytest.mark.parametrize("text", ["engine", "=3", "engine.=3", ".x=1"])
def test_an_assignment_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="not KEY=VALUE"):
        nested([text])


def test_a_secret_key_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    pair = generate(tmp_path, "worker")
    assert pair.secret_file.stat().st_mode & 0o777 == 0o600
    assert pair.public_file.read_text().strip() == pair.public_key
    assert len(pair.public_key) == 40
    secret = pair.secret_file.read_text()
    with pytest.raises(CommandError, match="exists"):
        generate(tmp_path, "worker")
    assert pair.secret_file.read_text() == secret
