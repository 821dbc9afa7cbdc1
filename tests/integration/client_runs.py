"""The same jobs through each client: in this process with the Python client, or in a program that
reads jobs on its standard input, as clients/c/tests/stress.c and clients/node/test/stress.mjs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.worker import ROOT
from tests.integration.zmq_raw import crc_of
from tokenbus.client import AsyncClient

C_SOURCE = ROOT / "clients" / "c"
NODE_SOURCE = ROOT / "clients" / "node"
C_PACKAGES = ("libzmq", "zlib")
C_HINT = "apt-get install gcc g++ make pkg-config libzmq3-dev libmsgpack-dev zlib1g-dev"
NODE_MAJOR = 20
RUN_S = 60.0
INSTALL_S = 120.0


# ------------------------------------------------------------ jobs and answers


@dataclass(frozen=True)
class Job:
    """One line of input of the programs."""

    prompt: str
    max_tokens: int = 40
    temperature: float = 0.0
    seed: int = -1
    kind: str = "0"  # "1": a chat; "cancel": cancelled after three tokens

    def line(self) -> str:
        """For a program's standard input."""
        parts = (self.max_tokens, self.temperature, self.seed, self.kind, self.prompt)
        return "\t".join(map(str, parts)) + "\n"

    def options(self) -> dict[str, Any]:
        """The same job for the Python client."""
        where: dict[str, Any] = {"prompt": self.prompt}
        if self.kind == "1":
            where = {"messages": [{"role": "user", "content": self.prompt}]}
        seed = {"seed": self.seed} if self.seed >= 0 else {}
        return {**where, **seed, "max_tokens": self.max_tokens, "temperature": self.temperature}


@dataclass(frozen=True)
class Answer:
    """How a job ended, and all of it."""

    end: str
    text: bytes
    ids: tuple[int, ...]


def read_answer(line: str) -> Answer:
    """A program's line of output."""
    _, end, seq, crc, text, *rest = line.split("\t")
    ids = tuple(int(i) for i in rest[0].split(",")) if rest else ()
    assert int(seq) == len(ids)
    assert end not in ("stop", "length", "cancelled") or int(crc) == crc_of(list(ids))
    return Answer(end, bytes.fromhex(text), ids)


def twenty_jobs(max_tokens: int) -> list[Job]:
    """Ten greedy and ten seeded ones, some of them chats."""
    topics = ("The sea is", "Grüße, 你好 🙂", "def add(a, b):", "Once upon a time", "1 2 3 4")
    greedy = [Job(f"{t} {i}", max_tokens, kind=str(i % 2)) for t in topics for i in range(2)]
    seeded = [Job(f"{t} {i}", max_tokens, 0.9, seed=i) for t in topics for i in range(2)]
    return greedy + seeded


# ------------------------------------------------------------ runs


@dataclass
class ProgramRun:
    """The jobs in a running program."""

    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """All jobs have ended."""
        return self.process.returncode is not None

    async def reach(self, count: int) -> None:
        """Until every running job has that many tokens."""
        assert self.process.stderr is not None
        while not any(int(line.split()[1]) >= count for line in self.log if "tokens " in line):
            line = await asyncio.wait_for(self.process.stderr.readline(), RUN_S)
            assert line, self.log
            self.log.append(line.decode())

    async def answers(self) -> list[Answer]:
        """Until it ends. Its own checks (holes, repeats, events after an end) must have held."""
        output, rest = await asyncio.wait_for(self.process.communicate(), 4 * RUN_S)
        assert self.process.returncode == 0, "".join(self.log) + rest.decode()
        return [read_answer(line) for line in output.decode().splitlines()]

    async def stop(self) -> None:
        """Kill the program if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def start_program(command: Sequence[str], jobs: Sequence[Job]) -> ProgramRun:
    """A program with these jobs on its standard input."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    process.stdin.write("".join(job.line() for job in jobs).encode())
    process.stdin.close()
    return ProgramRun(process)


class PythonRun:
    """The jobs with the Python client in this process. `options`: more fields of each job."""

    def __init__(
        self,
        endpoint: str,
        jobs: Sequence[Job],
        options: Mapping[str, Any] | None = None,
        **client_options: Any,
    ) -> None:
        self._client = AsyncClient(zmq=endpoint, **client_options)
        self._options = dict(options or {})
        self._counts = [0] * len(jobs)
        self._changed = asyncio.Event()
        self._names = [f"python-{uuid.uuid4().hex}" for _ in jobs]
        self._tasks = [asyncio.create_task(self._run(i, job)) for i, job in enumerate(jobs)]

    async def _run(self, index: int, job: Job) -> Answer:
        stream = self._client.generate(job=self._names[index], **job.options(), **self._options)
        text, ids = "", []
        async for event in stream:
            assert event.seq == len(ids) + 1, f"seq {event.seq} after {len(ids)} tokens"
            ids += event.ids
            text += event.text
            self._counts[index] = len(ids)
            self._changed.set()
        assert stream.done is not None
        assert stream.done.crc == crc_of(ids)
        return Answer(stream.done.reason, text.encode(), tuple(ids))

    async def reach(self, count: int) -> None:
        """Until every job has that many tokens."""
        async with asyncio.timeout(RUN_S):
            while min(self._counts) < count:
                self._changed.clear()
                await self._changed.wait()

    @property
    def is_over(self) -> bool:
        """All jobs have ended."""
        return all(task.done() for task in self._tasks)

    async def states(self) -> list[str]:
        """Where the worker says that each job is."""
        statuses = await asyncio.gather(*(self._client.status(name) for name in self._names))
        return [status.state for status in statuses]

    async def answers(self) -> list[Answer]:
        """Until all jobs have ended."""
        async with asyncio.timeout(4 * RUN_S):
            return list(await asyncio.gather(*self._tasks))

    async def stop(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()


async def run_python(endpoint: str, jobs: Sequence[Job]) -> list[Answer]:
    """All jobs at once over one connection."""
    run = PythonRun(endpoint, jobs)
    try:
        return await run.answers()
    finally:
        await run.stop()


# ------------------------------------------------------------ programs


def what_c_misses() -> str:
    """Tools and headers that the C library needs and this machine lacks; a skip also in CI, where
    the base image may have no compiler.
    """
    tools = [tool for tool in ("cc", "c++", "make", "pkg-config") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)}: {C_HINT}"

    def has(name: str) -> bool:
        return subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0

    packages = [name for name in C_PACKAGES if not has(name)]
    if not (has("msgpack-c") or has("msgpack")):
        packages.append("msgpack-c")
    return f"no headers of {', '.join(packages)}: {C_HINT}" if packages else ""


def make_c(directory: Path, *arguments: str) -> str:
    """Make targets of the C library in a directory; returns what was printed."""
    done = subprocess.run(
        ["make", "-C", str(C_SOURCE), f"BUILD={directory}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def what_node_misses() -> str:
    """What the Node client needs and this machine lacks."""
    tools = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)}: Node.js {NODE_MAJOR} or later, https://nodejs.org"
    done = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    major = version.lstrip("v").partition(".")[0]
    is_good = major.isdecimal() and int(major) >= NODE_MAJOR
    return "" if is_good else f"node {version or 'does not run'}: {NODE_MAJOR} or later is needed"


def build_node(directory: Path) -> str:
    """Compile the Node client into a directory, with the packages installed in its source tree or
    else fetched. Returns why that cannot be done here, or nothing.
    """
    for name in ("package.json", "package-lock.json", "tsconfig.json"):
        shutil.copy(NODE_SOURCE / name, directory)
    for name in ("src", "test"):
        shutil.copytree(NODE_SOURCE / name, directory / name)
    if (NODE_SOURCE / "node_modules" / ".bin" / "tsc").exists():
        (directory / "node_modules").symlink_to(NODE_SOURCE / "node_modules")
    else:
        install = ["npm", "ci", "--no-audit", "--no-fund"]
        try:
            subprocess.run(
                install, cwd=directory, capture_output=True, timeout=INSTALL_S, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return f"the packages of clients/node cannot be had: {error}"
    # Types are checked where the package is built; here that would take most of the time.
    compiler = ["node_modules/.bin/tsc", "-p", "tsconfig.json", "--noCheck"]
    done = subprocess.run(compiler, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ""
