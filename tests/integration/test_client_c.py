"""The C library against live workers: the same answers as the Python client, also when the engine
or the broker is killed in mid-stream. Compiles into a temporary directory. The real model's answers
are in test_three_clients.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.config import FakeModel
from engine.fake_runner import expected_tokens
from tests.integration.client_runs import (
    C_SOURCE,
    RUN_S,
    Answer,
    Job,
    ProgramRun,
    make_c,
    run_python,
    start_program,
    twenty_jobs,
    what_c_misses,
)
from tests.integration.worker import make_worker, running
from tests.integration.zmq_raw import letters_of

VOCAB = 512
MISSING = what_c_misses()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(400),  # compiles, and two cores may be busy
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, examples and test programs, compiled; a warning is an error."""
    directory = tmp_path_factory.mktemp("libtokenbus")
    make_c(directory, "all", "tests", "CFLAGS=-O1 -g -Werror")
    return directory


async def start(build: Path, endpoint: str, jobs: Sequence[Job], *mode: str) -> ProgramRun:
    command = [str(build / "stress"), endpoint, *mode]
    if mode == ("valgrind",):
        checks = ("--quiet", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=all")
        command = ["valgrind", *checks, "--errors-for-leak-kinds=all", *command[:2]]
    return await start_program(command, jobs)


async def run_c(build: Path, endpoint: str, jobs: Sequence[Job], *mode: str) -> list[Answer]:
    return await (await start(build, endpoint, jobs, *mode)).answers()


# ------------------------------------------------------------ the programs


def test_the_programs_of_the_readme_compile(build: Path) -> None:
    blocks = re.findall(r"```(c|cpp)\n(.*?)```", (C_SOURCE / "README.md").read_text(), re.DOTALL)
    assert {language for language, _ in blocks} == {"c", "cpp"}
    for language, code in blocks:
        compiler = ["cc", "-std=c11"] if language == "c" else ["c++", "-std=c++17"]
        source = build / f"readme.{language}"
        source.write_text(code)
        command = [
            *compiler,
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            f"-I{C_SOURCE}/include",
        ]
        done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_vectors_and_scripted_workers_pass_without_an_error_in_memory(build: Path) -> None:
    target = "memcheck" if shutil.which("valgrind") else "test"
    output = make_c(build, target, "CFLAGS=-O1 -g -Werror")
    assert output.count("no failures") == 3
    assert ", 0 failures" in output


async def test_the_examples_stream_an_answer(build: Path, tmp_path: Path) -> None:
    async with running(make_worker(tmp_path, fake=FakeModel(vocab_size=VOCAB))) as worker:
        for program, prompt in (("example", "hello"), ("example-cpp", "hello")):
            arguments = [prompt, "20"] if program == "example" else [prompt]
            process = await asyncio.create_subprocess_exec(
                build / program,
                worker.endpoint,
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await asyncio.wait_for(process.communicate(), RUN_S)
            assert process.returncode == 0, errors
            if program == "example":
                ids = expected_tokens([b % VOCAB for b in prompt.encode()], 20, VOCAB)
                assert output.decode() == letters_of(ids)
            assert errors.decode().strip().startswith("length")


async def test_an_installed_library_is_found_by_pkg_config(build: Path, tmp_path: Path) -> None:
    make_c(build, "install", f"PREFIX={tmp_path}")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(tmp_path / "lib" / "pkgconfig")}
    command = (
        f"cc {C_SOURCE}/examples/example.c -o {tmp_path}/example"
        f" $(pkg-config --cflags --libs tokenbus) -Wl,-rpath,{tmp_path}/lib && {tmp_path}/example"
    )
    done = subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


# ------------------------------------------------------------ live workers


async def test_twenty_jobs_have_the_same_bytes_as_with_the_python_client(
    build: Path, tmp_path: Path
) -> None:
    jobs = twenty_jobs(max_tokens=40)
    async with running(make_worker(tmp_path, fake=FakeModel(vocab_size=VOCAB))) as worker:
        expected = await run_python(worker.endpoint, jobs)
        assert len({answer.ids for answer in expected}) == len(jobs)
        for mode in ((), ("fd",)):
            assert await run_c(build, worker.endpoint, jobs, *mode) == expected


async def test_refused_and_cancelled_jobs_end_among_others(build: Path, tmp_path: Path) -> None:
    jobs = [Job("a"), Job("b", max_tokens=0), Job("c", max_tokens=2000, kind="cancel"), Job("d")]
    mode = ("valgrind",) if shutil.which("valgrind") else ()
    fake = FakeModel(vocab_size=VOCAB, step_ms=2.0)
    async with running(make_worker(tmp_path, fake=fake)) as worker:
        answers = await run_c(build, worker.endpoint, jobs, *mode)
    assert [answer.end for answer in answers] == ["length", "invalid", "cancelled", "length"]
    assert 3 <= len(answers[2].ids) < 2000


async def test_kill_of_the_engine_in_mid_stream_leaves_no_hole_and_no_repeat(
    build: Path, tmp_path: Path
) -> None:
    jobs = twenty_jobs(max_tokens=120)
    fake = FakeModel(vocab_size=VOCAB, step_ms=3.0)
    async with running(make_worker(tmp_path, fake=fake)) as worker:
        expected = await run_c(build, worker.endpoint, jobs)
        stress = await start(build, worker.endpoint, jobs)
        for count, reached in ((2, 20), (3, 60)):
            await stress.reach(reached)
            await worker.kill_engine()
            await worker.start_engine()
            await worker.wait_for("ready", count)
        assert await stress.answers() == expected


async def test_kill_of_the_broker_in_mid_stream_is_survived_by_submitting_again(
    build: Path, tmp_path: Path
) -> None:
    jobs = twenty_jobs(max_tokens=120)
    fake = FakeModel(vocab_size=VOCAB, step_ms=3.0)
    async with running(make_worker(tmp_path, fake=fake)) as worker:
        expected = await run_c(build, worker.endpoint, jobs)
        stress = await start(build, worker.endpoint, jobs)
        await stress.reach(30)
        assert worker.broker is not None
        worker.broker.kill()
        await worker.broker.wait()
        await worker.start_broker()  # on the same endpoint; the engine reconnects
        assert await stress.answers() == expected
