"""Exit codes of the command line, each with its reason. Scripts branch on them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a `tokenbus` command ended with."""

    OK = 0  # it did what it says; for serve: drained and stopped
    FAILED = 1  # anything without a code of its own
    USAGE = 2  # a flag or an argument is wrong
    BAD_SETTING = 3  # a setting from a flag, the environment or tokenbus.toml is wrong
    MODEL_UNAVAILABLE = 4  # the model cannot be found, fetched, verified or loaded
    BUS_UNAVAILABLE = 5  # Redis or the worker cannot be reached, or an address is taken
    JOB_FAILED = 6  # the job was refused or ended in an error
    NOT_FOUND = 7  # no such job
    ENGINE_LOST = 8  # the engine keeps crashing; the supervisor gave up
    BROKER_LOST = 9  # the broker keeps crashing; the supervisor gave up
    CHECK_FAILED = 10  # doctor found something to mend
    INTERRUPTED = 130  # Ctrl-C


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed for a reason without a code of its own",
    ExitCode.USAGE: "wrong flag or argument",
    ExitCode.BAD_SETTING: "wrong setting (flag, environment or tokenbus.toml)",
    ExitCode.MODEL_UNAVAILABLE: "the model cannot be found, fetched, verified or loaded",
    ExitCode.BUS_UNAVAILABLE: "Redis or the worker cannot be reached, or an address is taken",
    ExitCode.JOB_FAILED: "the job was refused or ended in an error",
    ExitCode.NOT_FOUND: "no such job",
    ExitCode.ENGINE_LOST: "the engine keeps crashing; gave up",
    ExitCode.BROKER_LOST: "the broker keeps crashing; gave up",
    ExitCode.CHECK_FAILED: "doctor found something to mend",
    ExitCode.INTERRUPTED: "interrupted",
}


class CommandError(Exception):
    """A command cannot go on. `message` says what is wrong; `remedy` what to do about it."""

    def __init__(self, code: ExitCode, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
