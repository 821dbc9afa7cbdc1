"""`python -m engine --config FILE --link PATH`: load a model, then serve one broker after
another.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from broker.log import add_log_arguments, configure_logging, report_failure
from broker.ring.errors import LinkError, RingError
from broker.ring.link import EngineLink, connect_engine
from broker.ring.records import Kind, encode_json
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, LinkLost, ModelError
from engine.loop import EngineLoop, LoopEnd, freeze_heap
from engine.mailbox import LinkMailbox, StopSignal
from engine.plan import Runner
from engine.scheduler import Scheduler

EXIT_OK = 0  # SIGTERM, or SHUTDOWN from the broker
EXIT_FAILED = 1  # a typed error, logged in one line
EXIT_USAGE = 2  # the command line or the configuration file cannot be used
EXIT_BAD_SETTING = 3  # a setting that cannot work: starting again would not help
EXIT_NO_MODEL = 4  # a model that cannot be loaded: nor here

CONNECT_TIMEOUT_S = 1.0
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
PROGRESS_INTERVAL_S = 0.1

Progress = Callable[[str, int, int], None]

log = structlog.get_logger()


class StoppedWhileLoading(Exception):
    """SIGTERM came before the model was ready."""


def main(argv: list[str] | None = None) -> int:
    """Run the engine process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="EngineConfig as JSON")
    parser.add_argument("--link", required=True, metavar="PATH", help="the broker's unix socket")
    parser.add_argument("--status-fd", type=int, metavar="FD", help="descriptor for status lines")
    add_log_arguments(parser)
    args = parser.parse_args(argv)
    configure_logging(format_=args.log_format, level=args.log_level)
    try:
        config = EngineConfig.from_json(Path(args.config).read_text())
    except (OSError, ValueError, TypeError) as error:
        log.error("engine.config_unusable", path=args.config, error=str(error))
        report_failure(args.status_fd, f"{args.config}: {error}")
        return EXIT_USAGE
    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        _serve(config, args.link, stop)
    except StoppedWhileLoading:
        log.info("engine.stopped", while_loading=True)
    except (EngineError, RingError) as error:
        log.error("engine.failed", kind=type(error).__name__, error=str(error))
        report_failure(args.status_fd, str(error))
        if isinstance(error, ConfigError):
            return EXIT_BAD_SETTING
        return EXIT_NO_MODEL if isinstance(error, ModelError) else EXIT_FAILED
    return EXIT_OK


def builder(config: EngineConfig) -> Callable[[Progress], Runner]:
    """What makes the runner that the configuration asks for.

    torch is imported here, and only for a real model: that takes seconds, in which the broker of a
    new worker starts.
    """
    if config.fake is not None:
        from engine.fake_runner import build_fake_runner

        return lambda _: build_fake_runner(config)
    if not config.model_path:
        raise ConfigError("model_path", config.model_path, "set it to a directory or .gguf file")
    from engine.threads import set_thread_waiting

    set_thread_waiting()
    from engine.build import build_runner

    def build(progress: Progress) -> Runner:
        return build_runner(config, lambda p: progress("weights", p.done_bytes, p.total_bytes))

    return build


def _serve(config: EngineConfig, path: str, stop: StopSignal) -> None:
    """Load once, then run the loop on one link after another until told to stop."""
    build = builder(config)
    link = _connect(path, stop)
    if link is None:
        return
    runner = build(_progress_to(link, stop))
    try:
        loop = EngineLoop(runner, Scheduler(runner.info, config.enable_prefix_cache))
        log.info(
            "engine.ready",
            model=runner.info.model,
            device=runner.info.device,
            num_blocks=runner.info.num_blocks,
            kv_gib=round(runner.info.kv_bytes / 2**30, 3),
            load_s=round(runner.info.load_s, 3),
        )
        freeze_heap()
        while link is not None:
            end = _run_on(link, loop, stop)
            if end is not None:
                log.info("engine.stopped", reason=end.value, steps=loop.stats.num_steps)
                return
            link = _connect(path, stop)
    finally:
        runner.close()


def _run_on(link: EngineLink, loop: EngineLoop, stop: StopSignal) -> LoopEnd | None:
    """Serve one broker; None if it went away."""
    mailbox = LinkMailbox(link, stop)
    stop.on_set(loop.stop)
    try:
        return loop.run(mailbox, mailbox)
    except (LinkLost, RingError) as error:
        log.warning("engine.link_lost", kind=type(error).__name__, error=str(error))
        loop.drop_runs()
        return None
    finally:
        mailbox.close()


def _connect(path: str, stop: StopSignal) -> EngineLink | None:
    """Try until a broker answers; None if told to stop before."""
    attempt = 0
    while not stop.is_set:
        try:
            link = connect_engine(path, CONNECT_TIMEOUT_S)
        except LinkError as error:
            if attempt % 20 == 0:
                log.info("engine.waiting_for_broker", path=path, error=str(error))
            stop.wait(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1
        else:
            log.info("engine.connected", path=path, broker_pid=link.peer_pid)
            return link
    return None


def _progress_to(link: EngineLink, stop: StopSignal) -> Progress:
    """A callback (stage, done, total) that tells the broker, at most ten times a second a stage."""
    last: dict[str, float] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if stop.is_set:
            raise StoppedWhileLoading
        now_s = time.monotonic()
        if done < total and now_s - last.get(stage, 0.0) < PROGRESS_INTERVAL_S:
            return
        last[stage] = now_s
        # A broker that died meanwhile shows when the loop starts; loading goes on.
        with suppress(RingError):
            link.events.try_write(
                Kind.PROGRESS, encode_json({"stage": stage, "done": done, "total": total})
            )

    return progress


if __name__ == "__main__":
    sys.exit(main())
