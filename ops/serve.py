"""`tokenbus serve`: put a worker together from the settings, run it, say when it is ready."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

import broker
import tokenbus
from broker.actor import ActorSystem
from broker.log import configure_logging
from ops import embedded_redis, worker_files
from ops.child import ChildSpec
from ops.exit_codes import CommandError, ExitCode
from ops.models import ResolvedModel
from ops.serve_view import LoadBar, ready_line
from ops.settings import FAKE_MODEL, Settings, broker_config, engine_config, public_url
from ops.supervisor import Supervisor
from ops.supervisor_messages import Progress, Ready, Stop, WorkerEvent

log = structlog.get_logger("ops.serve")

# -P: a folder called `engine` in the current directory must not be taken for ours.
PYTHON_M = (sys.executable, "-P", "-m")
LINK_NAME = "link.sock"
# Threads that wait for each other sleep. By default they spin, and when the broker, Redis or a
# client takes one of their cores, all the others burn theirs until that one is back: on two busy
# cores eight jobs together got 26 tok/s spinning and 103 sleeping. What the user has set wins.
OPENMP = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(settings: Settings, resolve: Callable[[str], ResolvedModel], *, as_json: bool) -> int:
    """Run a worker until it is told to stop; the return value is the exit code.

    resolve: from a model's name to its files. as_json: events on stdout as JSON lines. Raises
    CommandError where the worker cannot start, or has given up.
    """
    configure_logging(format_=settings.log_format, level=settings.log_level)
    if settings.redis_mode == "none" and settings.zmq == "none":
        raise CommandError(
            ExitCode.BAD_SETTING,
            "redis = none and zmq = none: a worker without a door gets no jobs",
            "Leave one of them out to take its default.",
        )
    model = resolve_model(settings, resolve)
    worker_files.make_data_dir(settings.data_dir)
    with ExitStack() as stack:
        redis = None
        if settings.redis_mode == "embedded":
            stack.enter_context(worker_files.data_lock(settings.data_dir))
            redis = embedded_redis.plan(settings.data_dir)
        run_dir = stack.enter_context(worker_files.run_directory())
        stack.callback(worker_files.withdraw, settings.data_dir)
        worker = Worker(settings, model, run_dir, redis, as_json=as_json)
        return int(asyncio.run(worker.run()))


def resolve_model(settings: Settings, resolve: Callable[[str], ResolvedModel]) -> ResolvedModel:
    """The model's files; the fake model has none."""
    if settings.model == FAKE_MODEL:
        return ResolvedModel(Path(FAKE_MODEL), FAKE_MODEL)
    return resolve(settings.model)


class Worker:
    """The supervisor's surroundings: specs, signals, and what is said on stdout."""

    def __init__(
        self,
        settings: Settings,
        model: ResolvedModel,
        run_dir: Path,
        redis: embedded_redis.RedisPlan | None,
        *,
        as_json: bool,
    ) -> None:
        self.settings = settings
        self.model = model
        self.name = worker_name()
        self.run_dir = run_dir
        self.redis = redis
        self.as_json = as_json
        self._bar = LoadBar()
        self._pids: dict[str, int] = {}  # as last announced
        if redis is not None:
            self.redis_url = redis.url
        elif settings.redis_mode == "url":
            self.redis_url = settings.redis.get_secret_value()
        else:
            self.redis_url = ""

    async def run(self) -> ExitCode:
        """Until the supervisor has finished, or has crashed."""
        loop = asyncio.get_running_loop()
        system = ActorSystem(loop)
        supervisor = Supervisor(
            system,
            self._specs(),
            drain_s=self.settings.drain_s,
            on_event=self._on_event,
            after_start={"redis": self._redis_ready} if self.redis else None,
        )
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, supervisor.tell, Stop(number.name))
        system.start()
        ends: list[asyncio.Future[Any]] = [supervisor.finished, system.crashed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._bar.close()
        await system.stop()
        if supervisor.failure is not None:
            raise supervisor.failure
        return supervisor.finished.result() if supervisor.finished.done() else ExitCode.FAILED

    async def _redis_ready(self) -> None:
        if self.redis is not None:
            await embedded_redis.wait_ready(self.redis)

    def _write_broker_config(self, settings: Settings) -> Path:
        config = broker_config(
            settings,
            self.model,
            worker=self.name,
            link_path=self.run_dir / LINK_NAME,
            redis_url=self.redis_url,
        )
        return worker_files.write_private(self.run_dir / "broker.json", config.to_json())

    def _keep_addresses(self, zmq: str, http: str) -> None:
        """The next broker binds the ports that this one got, where its clients look for them."""
        got = {"zmq": zmq, "http": http.removeprefix("http://")}
        changed = {
            key: value
            for key, value in got.items()
            if value and value != getattr(self.settings, key)
        }
        if changed:
            self.settings = self.settings.model_copy(update=changed)
            self._write_broker_config(self.settings)

    def _specs(self) -> list[ChildSpec]:
        """The processes in the order of their start."""
        link = self.run_dir / LINK_NAME
        engine_json = engine_config(self.settings, self.model).to_json()
        broker_file = self._write_broker_config(self.settings)
        engine_file = worker_files.write_private(self.run_dir / "engine.json", engine_json)
        env = {"PYTHONPATH": import_path()}
        status = ("--status-fd", "{status_fd}", *log_arguments(self.settings))
        broker_argv = (*PYTHON_M, "broker", "--config", str(broker_file), *status)
        engine_argv = (*PYTHON_M, "engine", "--config", str(engine_file), "--link", str(link))
        specs = [
            ChildSpec("broker", broker_argv, env=env),
            ChildSpec("engine", (*engine_argv, *status), env={**OPENMP, **env}),
        ]
        if self.redis is not None:
            # SIGTERM: it writes its append-only file to the end.
            specs.insert(0, ChildSpec("redis", self.redis.argv, death_signal=signal.SIGTERM))
        return specs

    # ------------------------------------------------------------ what the user sees

    def _on_event(self, event: WorkerEvent) -> None:
        if isinstance(event, Progress):
            self._on_progress(event)
            return
        self._bar.close()
        announcement = self._announcement(event)
        worker_files.announce(self.settings.data_dir, announcement)
        log.info("worker.ready", worker=self.name, pids=announcement.pids)
        if self.as_json:
            said = asdict(announcement) | {"redis": public_url(announcement.redis)}
            is_new = not self._pids or self._pids == announcement.pids
            self._say(json.dumps({"event": "ready" if is_new else "restarted", **said}))
        elif event.is_first:
            self._say(ready_line(announcement))
        self._pids = announcement.pids

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # who asked may have read enough
            print(line, flush=True)

    def _announcement(self, event: Ready) -> worker_files.Announcement:
        return worker_files.Announcement(
            zmq=str(event.data.get("zmq") or ""),
            redis=self.redis_url,
            queue=self.settings.queue,
            model=self.model.name,
            worker=self.name,
            pids={"supervisor": os.getpid(), **event.pids},
            http=str(event.data.get("http") or ""),
        )

    def _on_progress(self, event: Progress) -> None:
        data = {key: value for key, value in event.data.items() if key != "event"}
        match event.data.get("event"):
            case "listening":
                self._keep_addresses(str(data.get("zmq") or ""), str(data.get("http") or ""))
            case "progress" if "done" in data:
                self._bar.update(str(data.get("stage", "")), data["done"], data.get("total", 0))
            case name:
                log.debug("broker.says", what=name, **data)


def import_path() -> str:
    """PYTHONPATH under which a child finds the packages that this process runs."""
    roots = [str(Path(str(module.__file__)).parent.parent) for module in (broker, tokenbus)]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([*roots, *given]))


def log_arguments(settings: Settings) -> tuple[str, ...]:
    """How a process of the worker is to log."""
    return ("--log-level", settings.log_level, "--log-format", settings.log_format)


def worker_name() -> str:
    """Unique among all workers of a queue: host, process, and a random part for reused ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


# ---------------------------------------------------------------- one process alone


def run_broker(settings: Settings, model: ResolvedModel, link: Path) -> int:
    """The broker in the foreground, without supervisor; the return value is its exit code."""
    if settings.redis_mode == "embedded" and "redis" in settings.model_fields_set:
        raise CommandError(
            ExitCode.BAD_SETTING,
            "redis = embedded: only `serve` runs an embedded Redis",
            "Give --redis redis://host:6379/0 or none.",
        )
    url = settings.redis.get_secret_value() if settings.redis_mode == "url" else ""
    config = broker_config(
        settings, model, worker=worker_name(), link_path=link.absolute(), redis_url=url
    )
    return _run_alone(settings, ("broker",), config.to_json())


def run_engine(settings: Settings, model: ResolvedModel, link: Path) -> int:
    """The engine in the foreground, without supervisor; the return value is its exit code."""
    config = engine_config(settings, model).to_json()
    return _run_alone(settings, ("engine", "--link", str(link.absolute())), config)


def _run_alone(settings: Settings, arguments: tuple[str, ...], config: str) -> int:
    """Run `python -m` arguments with the configuration; Ctrl-C and SIGTERM reach the child."""
    with worker_files.run_directory() as directory:
        file = worker_files.write_private(directory / "config.json", config)
        process = subprocess.Popen(
            [*PYTHON_M, *arguments, "--config", str(file), *log_arguments(settings)],
            env={**os.environ, "PYTHONPATH": import_path()},
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the child as well
        return process.wait()
