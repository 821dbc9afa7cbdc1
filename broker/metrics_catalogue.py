"""Every metric that the broker process exports: name, kind, labels, what it says.

One table for the exporter, the documentation, and the test that dashboard and alerts use nothing
else. Label values come from fixed sets: never a job, a tenant or a client. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "tokenbus_"


class Kind(Enum):
    """As Prometheus names them. Names of counters end in `_total`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without the prefix. buckets: upper bounds of a histogram, ascending, without +Inf."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As it is exported."""
        return PREFIX + self.name


_MS = 1e-3
# 5 ms .. 60 s: from an idle GPU to a long queue.
_WAIT_BUCKETS = (
    *(n * _MS for n in (5, 10, 20, 35, 50, 75, 100, 150, 200, 350, 500, 750)),
    *(1.0, 1.5, 2.0, 3.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0),
)
# 0.2 ms .. 2 s: a small model on a GPU, to a large one on a busy CPU.
_TOKEN_BUCKETS = (
    *(n * _MS for n in (0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3.5, 5, 7.5, 10, 15, 20, 35, 50, 75)),
    *(0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0),
)
_JOB_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 3600)
_POWERS = tuple(float(1 << n) for n in range(15))  # 1 .. 16,384

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

CATALOGUE: tuple[Metric, ...] = (
    # the worker
    Metric("build_info", _G, "Always 1; what runs here", ("version", "model", "queue", "worker")),
    Metric("start_time_seconds", _G, "When this broker process started, seconds since 1970"),
    Metric("ready", _G, "1 while the worker takes jobs: engine and doors are ready"),
    Metric("draining", _G, "1 from the beginning of a drain on"),
    Metric("engine_up", _G, "1 while an engine is connected and has loaded its model"),
    Metric("engine_restarts_total", _C, "Engines that became ready after the first"),
    Metric("engine_losses_total", _C, "Engines that were lost: crashed, killed or hung"),
    # jobs
    Metric("queue_jobs", _G, "Jobs that wait in this worker's queue", ("priority",)),
    Metric("queue_oldest_seconds", _G, "Age of the oldest job in this worker's queue"),
    Metric("running_jobs", _G, "Jobs in the engine"),
    Metric("max_running_jobs", _G, "Rows of the engine: jobs that it computes at once"),
    Metric("suspect_jobs", _G, "Jobs that wait to run alone after an engine died"),
    Metric("paused_jobs", _G, "Jobs whose reader is too slow"),
    Metric(
        "jobs_total",
        _C,
        "Jobs that ended here; outcome is the reason, or the error's code",
        ("door", "outcome"),
    ),
    Metric("refused_total", _C, "Jobs that were not taken, by error code", ("door", "code")),
    Metric("poisoned_jobs_total", _C, "Jobs given up because engines died with them inside"),
    # latencies
    Metric(
        "ttft_seconds", _H, "From a job's arrival here to its first token", ("door",), _WAIT_BUCKETS
    ),
    Metric(
        "queue_wait_seconds", _H, "From a job's arrival here to its start", ("door",), _WAIT_BUCKETS
    ),
    Metric("inter_token_seconds", _H, "Between two tokens of one job", (), _TOKEN_BUCKETS),
    Metric("job_seconds", _H, "From a job's arrival here to its end", ("door",), _JOB_BUCKETS),
    # tokens and steps
    Metric("prompt_tokens_total", _C, "Prompt tokens of ended jobs"),
    Metric("output_tokens_total", _C, "Tokens that the engine made"),
    Metric("prefix_hit_tokens_total", _C, "Prompt tokens that the prefix cache gave"),
    Metric("computed_tokens_total", _C, "Tokens computed in steps, prompts included"),
    Metric("steps_total", _C, "Steps of the engine"),
    Metric("step_seconds", _H, "Duration of a step, launch to tokens", (), _TOKEN_BUCKETS),
    Metric("step_rows", _H, "Jobs that got a token in a step", (), _POWERS[:11]),
    Metric("step_tokens", _H, "Tokens computed in a step", (), _POWERS),
    Metric("phase_seconds_total", _C, "Time of the engine's loop, by phase", ("phase",)),
    Metric("kv_blocks_used", _G, "KV cache blocks in use"),
    Metric("kv_blocks_cached", _G, "Free KV cache blocks that hold a known prefix"),
    Metric("kv_blocks", _G, "KV cache blocks"),
    Metric("preemptions_total", _C, "Jobs put back for want of KV cache blocks"),
    # the Redis door
    Metric("redis_up", _G, "1 while Redis answers and takes writes; absent without a Redis door"),
    Metric("redis_reconnects_total", _C, "Connections to Redis made again after a loss"),
    Metric("backlog_jobs", _G, "Jobs in Redis that no worker has taken", ("priority",)),
    Metric("backlog_oldest_seconds", _G, "Age of the oldest job that no worker has taken"),
    Metric("dead_letter_entries", _G, "Entries in the dead stream"),
    Metric("dead_letters_total", _C, "Jobs that this worker put into the dead stream"),
    Metric("takeovers_total", _C, "Jobs taken over from workers that fell silent"),
    Metric("fences_lost_total", _C, "Jobs that another worker took from this one"),
    Metric("released_total", _C, "Jobs given back to Redis, uncounted"),
    Metric("replies_restored_total", _C, "Reply streams written again after Redis lost them"),
    Metric("duplicates_total", _C, "Entries whose job was there already"),
    # the ZeroMQ door
    Metric("zmq_clients", _G, "Clients that are connected"),
    Metric("zmq_muted_peers", _G, "Connections ignored for their bad frames"),
    Metric("zmq_streams", _G, "Jobs of the ZeroMQ door that have not ended"),
    Metric("zmq_events_total", _C, "Token events sent"),
    Metric("zmq_messages_total", _C, "TOKENS messages sent"),
    # the process
    Metric("mailbox_messages", _G, "Messages that wait, by actor", ("actor",)),
    Metric("loop_lag_seconds", _G, "How late the event loop's last timer was"),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}


def table() -> str:
    """The catalogue as a table in Markdown."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join(rows)
