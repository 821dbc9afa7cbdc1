"""Load for an engine loop driven in-process: requests in, timed events out, no ring."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.ring.records import (
    Finish,
    Kind,
    Sampling,
    StepEvents,
    Submit,
    decode_reject,
    decode_step,
    encode_submit,
    step_counts,
)
from engine.loop import EngineLoop


@dataclass(frozen=True, slots=True)
class Workload:
    """num_requests random prompts. rate_per_s 0: all at once. Tokens never end a run early."""

    num_requests: int
    input_len: int
    output_len: int
    vocab_size: int
    rate_per_s: float = 0.0
    seed: int = 0
    temperature: float = 0.0

    def submits(self, first_rid: int) -> list[Submit]:
        """The runs, with rids from first_rid up."""
        rng = np.random.default_rng(self.seed)
        none = np.zeros(0, np.int32)
        return [
            Submit(
                rid=first_rid + i,
                prompt_ids=rng.integers(0, self.vocab_size, self.input_len, dtype=np.int32),
                prefix_ids=none,
                stop_token_ids=none,
                max_tokens=self.output_len,
                sampling=Sampling(seed=first_rid + i, temperature=self.temperature),
            )
            for i in range(self.num_requests)
        ]


@dataclass
class Recorder:
    """A request source that releases submits on time and a sink that notes when tokens came.

    While a run goes on only what is asked for meanwhile is counted: the runs that have a first
    token, and those that ended. The rest is taken apart afterwards, so that the sink's share of a
    step is as small as that of the ring.
    """

    due: deque[tuple[int, Submit]] = field(default_factory=deque)  # monotonic ns
    sent_ns: dict[int, int] = field(default_factory=dict)
    num_started: int = 0
    num_finished: int = 0
    stats: deque[bytes] = field(default_factory=deque)
    _steps: list[tuple[int, bytes]] = field(default_factory=list)  # monotonic ns, STEP record

    def read(self, max_records: int) -> list[tuple[int, bytes]]:
        """Submits that are due."""
        records: list[tuple[int, bytes]] = []
        now_ns = time.monotonic_ns()
        while self.due and self.due[0][0] <= now_ns and len(records) < max_records:
            _, submit = self.due.popleft()
            self.sent_ns[submit.rid] = now_ns
            records.append((Kind.SUBMIT, encode_submit(submit)))
        return records

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the next submit is due."""
        if self.due:
            time.sleep(min(timeout_s, max(0.0, (self.due[0][0] - time.monotonic_ns()) / 1e9)))
        return bool(self.due)

    def try_write(self, kind: int, payload: bytes) -> bool:
        """Note a record; raises RuntimeError if a run was refused or failed."""
        if kind == Kind.STEP:
            self._note_step(payload)
        elif kind == Kind.REJECT:
            raise RuntimeError(decode_reject(payload).message)
        elif kind == Kind.STATS:
            self.stats.append(payload)
        return True

    def wait_room(self, payload_bytes: int, timeout_s: float) -> None:
        """Never full."""

    def token_ns(self) -> dict[int, npt.NDArray[np.int64]]:
        """When the tokens of each run came, monotonic ns, int64 [tokens], by rid."""
        if not self._steps:
            return {}
        rids = [decode_step(payload).rids for _, payload in self._steps]
        came_ns = np.repeat([ns for ns, _ in self._steps], [len(column) for column in rids])
        columns = np.concatenate(rids)
        order = np.argsort(columns, kind="stable")
        found, begins = np.unique(columns[order], return_index=True)
        series = np.split(came_ns[order], begins[1:])
        return dict(zip(found.tolist(), series, strict=True))

    def _note_step(self, payload: bytes) -> None:
        self._steps.append((time.monotonic_ns(), payload))
        num_started, num_ended = step_counts(payload)
        self.num_started += num_started
        self.num_finished += num_ended
        if num_ended:
            _check_ends(decode_step(payload))


def _check_ends(step: StepEvents) -> None:
    """Raises RuntimeError if a run failed."""
    for index in step.finish.nonzero()[0].tolist():
        finish = Finish(step.finish[index])
        if finish in (Finish.ERROR, Finish.ABORTED):
            raise RuntimeError(f"run {step.rids[index]} ended with {finish.name}")


@dataclass(frozen=True, slots=True)
class RunTimes:
    """One workload's result. Seconds, milliseconds as named; itl: time between tokens of a run.

    prefill_tok_s: prompt tokens a second until the last first token is out.
    """

    total_s: float
    tok_s: float
    decode_tok_s: float
    prefill_tok_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    num_tokens: int


def drive(loop: EngineLoop, load: Workload, first_rid: int = 1) -> tuple[RunTimes, Recorder]:
    """Run a workload through the loop to its end."""
    recorder = Recorder()
    submits = load.submits(first_rid)
    begin_ns = time.monotonic_ns()
    gap_ns = int(1e9 / load.rate_per_s) if load.rate_per_s > 0 else 0
    recorder.due.extend((begin_ns + i * gap_ns, submit) for i, submit in enumerate(submits))
    while recorder.num_finished < load.num_requests:
        if not loop.step(recorder, recorder):
            recorder.wait(0.001)
    end_ns = time.monotonic_ns()
    return _times(recorder, load, begin_ns, end_ns), recorder


def _times(recorder: Recorder, load: Workload, begin_ns: int, end_ns: int) -> RunTimes:
    token_ns = recorder.token_ns()
    ttft = np.array([token_ns[rid][0] - at for rid, at in recorder.sent_ns.items()]) / 1e6
    series = list(token_ns.values())
    gaps = np.concatenate([np.diff(ns) for ns in series]) / 1e6
    num_tokens = sum(len(ns) for ns in series)
    prefill_s = (max(int(ns[0]) for ns in series) - begin_ns) / 1e9
    return RunTimes(
        total_s=(end_ns - begin_ns) / 1e9,
        tok_s=num_tokens / ((end_ns - begin_ns) / 1e9),
        decode_tok_s=_steady_rate(series),
        prefill_tok_s=load.num_requests * load.input_len / prefill_s,
        ttft_ms_p50=_percentile(ttft, 50),
        ttft_ms_p99=_percentile(ttft, 99),
        itl_ms_p50=_percentile(gaps, 50),
        itl_ms_p99=_percentile(gaps, 99),
        num_tokens=num_tokens,
    )


def _steady_rate(series: list[npt.NDArray[np.int64]]) -> float:
    """Tokens per second while every run decodes: from the last first token to the first end."""
    begin = max(int(ns[0]) for ns in series)
    end = min(int(ns[-1]) for ns in series)
    if end <= begin:
        return 0.0
    count = sum(int(np.count_nonzero((ns > begin) & (ns <= end))) for ns in series)
    return count / ((end - begin) / 1e9)


def _percentile(values: npt.NDArray[np.float64], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4) if len(values) else 0.0
