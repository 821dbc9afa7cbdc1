"""The catalogue of log events: every event that the three processes write, and what it means.

Names, levels and keys are read from the calls in the source; the meanings are here. A test fails
when an event has no meaning, or a meaning no event.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("debug", "info", "warning", "error")
_PROCESSES = {"ops": "supervisor", "broker": "broker", "engine": "engine"}
_NAME = re.compile(r"[a-z_]+\.[a-z_]+")

MEANINGS = {
    "actor.crashed": "an actor raised: a bug; the process ends and is started again",
    "backlog.unknown": "Redis refuses to say what waits; the numbers of the backlog are missing",
    "broker.cannot_start": "a setting, a file or an address does not work; says which",
    "broker.drain_asked": "a signal, or somebody on the bus, wants the worker to drain",
    "broker.listening": "the doors are open, with every address",
    "broker.not_ready": "the worker takes no jobs; says why",
    "broker.ready": "the worker takes jobs",
    "broker.says": "a status line of the broker, as it came",
    "child.bad_status": "a process wrote a status line that is not JSON",
    "child.gone": "a process was gone before a signal reached it",
    "client.denied": "a CURVE key that is not in the allow list",
    "client.gone": "a client was silent for too long; its jobs are cancelled",
    "client.hello": "a client began a session",
    "client.moved": "a client came back on another connection",
    "drain.requested": "the control stream asks this worker to drain",
    "engine.config_unusable": "the engine's configuration cannot be read",
    "engine.connected": "broker and engine have found each other",
    "engine.failed": "the engine cannot go on; says why",
    "engine.gone": "the engine's connection ended",
    "engine.hung": "the engine said nothing for too long and is killed",
    "engine.link_lost": "the broker is gone; the engine keeps its weights and waits",
    "engine.lost": "the engine died with jobs inside; they run alone first, then go on",
    "engine.prepared": "what idle moments compile and capture is done; no request waits for it",
    "engine.ready": "the model is loaded",
    "engine.refused": "a connection to the engine socket that is not taken",
    "engine.stopped": "the engine ended as it was told",
    "engine.waiting_for_broker": "no broker answers at the socket yet",
    "entries.deleted": "somebody deleted job entries that workers held",
    "frame.bad": "a ZeroMQ message that is not in the protocol",
    "http.failed": "a page of the HTTP server raised: a bug",
    "job.discarded": "a Redis key of the job has the wrong type; the job is in the dead stream",
    "job.failed": "the one line of a job that ended in an error",
    "job.fenced": "another worker has taken the job; this one forgets it",
    "job.finished": "the one line of a job that ended",
    "job.not_run": "an entry whose job needs no run: a duplicate, or ended before",
    "job.rejected": "a request that cannot run; says the error's code and field",
    "job.taken": "a job from Redis begins here (level info from the second attempt on)",
    "jobs.left_to_lease": "jobs that could not be given back; their leases run out",
    "kv.exhausted": "running jobs were put back for want of KV cache blocks",
    "ledger.draining": "no new jobs; the running ones have drain_ms",
    "memory.planned": "what goes where in GPU memory",
    "process.crashed": "a process of the worker died",
    "process.restarting": "it is started again after a delay",
    "process.started": "a process of the worker was started",
    "process.stopped": "it ended as it was told",
    "process.straggler": "the broker did not drain in time and is killed",
    "redis.connected": "the Redis door is connected",
    "redis.dropped": "the connection to Redis is given up; says why",
    "redis.emptied": "Redis lost its data; what this worker holds is written again",
    "redis.lost": "Redis does not answer",
    "redis.refused": "Redis refuses commands; the door is not ready until it takes them",
    "relay.bad_entry": "a reply stream holds something that no worker wrote",
    "relay.bad_key": "a reply that a client follows is no stream; only its job fails there",
    "reply.restored": "a reply stream was written again after Redis lost it",
    "ring.corrupt": "a ring holds what the engine cannot have written; the engine is dropped",
    "runner.huge_pages": "weights of the CPU engine moved onto huge pages while idle",
    "runner.ready": "the runner's sizes: rows, blocks, threads",
    "stream.claimed": "a job was taken over from a worker that fell silent, or gave it back",
    "weights.loaded": "where the weights are and how long it took",
    "worker.cannot_start": "a process cannot be started",
    "worker.drained": "the drain is over; the broker ends",
    "worker.draining": "the worker stops; running jobs finish",
    "worker.giving_up": "a process crashed too often; the worker ends",
    "worker.ready": "the worker takes jobs; with its processes (`broker.ready` has the addresses)",
    "worker.stopped": "all processes have ended",
    "worker.stopping_now": "a second signal: running jobs are not waited for",
}


@dataclass(slots=True)
class Event:
    """An event as the source has it. keys: in the order of their appearance."""

    name: str
    processes: set[str] = field(default_factory=set)
    levels: set[str] = field(default_factory=set)
    keys: dict[str, None] = field(default_factory=dict)


def find_events() -> dict[str, Event]:
    """All events, by name, from the source of the three processes."""
    events: dict[str, Event] = {}
    for folder, process in _PROCESSES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name, level, keys in _log_calls(ast.parse(path.read_text())):
                event = events.setdefault(name, Event(name))
                event.processes.add(process)
                event.levels.add(level)
                event.keys |= dict.fromkeys(keys)
    return dict(sorted(events.items()))


def _log_calls(tree: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """(event, level, keys) for `log.info("thing.happened", ...)`; for the same on what `log.bind`
    gave, with its keys; and for `say(...)`, which is one of two levels: info.
    """
    bound = _bound_keys(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        first, function = node.args[0], node.func
        if not isinstance(first, ast.Constant) or not _NAME.fullmatch(str(first.value)):
            continue
        keys = _keywords(node)
        if isinstance(function, ast.Attribute) and function.attr in LEVELS:
            logger = function.value.id if isinstance(function.value, ast.Name) else ""
            yield str(first.value), function.attr, [*bound.get(logger, ()), *keys]
        elif isinstance(function, ast.Name) and function.id == "say":
            yield str(first.value), "info", keys


def _bound_keys(tree: ast.AST) -> dict[str, list[str]]:
    """For `line = log.bind(job=..., ...)`: the keys by the name of the variable."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function, target = node.value.func, node.targets[0]
            if isinstance(function, ast.Attribute) and function.attr == "bind":
                found[ast.unparse(target)] = _keywords(node.value)
    return found


def _keywords(call: ast.Call) -> list[str]:
    return [word.arg for word in call.keywords if word.arg and word.arg != "exc_info"]


def table() -> str:
    """The catalogue as a table in Markdown."""
    rows = ["| event | process | level | keys | meaning |", "|---|---|---|---|---|"]
    for name, event in find_events().items():
        levels = ", ".join(sorted(event.levels, key=LEVELS.index))
        keys = ", ".join(f"`{key}`" for key in event.keys)
        where = ", ".join(sorted(event.processes))
        rows.append(f"| `{name}` | {where} | {levels} | {keys} | {MEANINGS[name]} |")
    return "\n".join(rows)
