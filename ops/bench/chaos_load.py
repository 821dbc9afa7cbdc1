"""Steady load over every door, each job's events noted with their times, and what each must say.

A job's right answer is known before it runs: of the fake model by its function, of a real one by a
run before the first fault.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.ring.records import Sampling
from engine.fake_runner import expected_tokens
from ops.bench.chaos_audit import Seen
from tokenbus import AsyncClient
from tokenbus.door import Timeouts
from tokenbus.errors import Busy, Draining, TokenbusError
from tokenbus.stream import JobStream

FAKE_VOCAB = 512
PATIENT = Timeouts(connect_s=60.0, answer_s=30.0, give_up_s=180.0)


@dataclass(frozen=True, slots=True)
class Question:
    """A job to send, with its right answer."""

    options: Mapping[str, Any]
    ids: tuple[int, ...]
    text: str


class Questions(Protocol):
    """Where questions come from."""

    def draw(self, rng: random.Random) -> Question:
        """The next one."""
        ...


class FakeQuestions:
    """Random prompts for the fake model; half of them sampled with a seed."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._range = (min_tokens, max_tokens)

    def draw(self, rng: random.Random) -> Question:
        """See `Questions`."""
        prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(4, 60)))
        count = rng.randint(*self._range)
        options: dict[str, Any] = {"prompt": prompt, "max_tokens": count}
        sampling = Sampling()
        if rng.random() < 0.5:
            sampling = Sampling(temperature=0.8, seed=rng.getrandbits(31))
            options |= {"temperature": sampling.temperature, "seed": sampling.seed}
        ids = expected_tokens(list(prompt.encode()), count, FAKE_VOCAB, sampling)
        text = "".join(chr(97 + i % 26) for i in ids)
        return Question(options, tuple(ids), text)


class RealQuestions:
    """A few prompts of a real model, greedy and seeded, with the answers of an undisturbed run."""

    PROMPTS = (
        "Why is the sky blue?",
        "Write a short poem about the sea.",
        "Explain how a bicycle stays upright.",
        "List five uses for a paper clip.",
    )

    def __init__(self, max_tokens: int) -> None:
        self._options: list[dict[str, Any]] = [
            {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                **how,
            }
            for prompt in self.PROMPTS
            for how in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "top_p": 0.95})
        ]
        self._questions: list[Question] = []

    async def ask_undisturbed(self, client: AsyncClient) -> None:
        """Collect the right answers, one job after the other: alone in the batch."""
        for options in self._options:
            events = [tokens async for tokens in client.generate(**options)]
            ids = tuple(i for event in events for i in event.ids)
            text = "".join(event.text for event in events)
            self._questions.append(Question(options, ids, text))

    def draw(self, rng: random.Random) -> Question:
        """See `Questions`."""
        return rng.choice(self._questions)


@dataclass(slots=True)
class JobLog:
    """What one client saw of one job."""

    door: str
    question: Question
    job: str
    worker: str = ""  # that has it now, as far as the client knows
    begun_s: float = field(default_factory=time.monotonic)
    seen: list[Seen] = field(default_factory=list)
    batches: list[tuple[float, int]] = field(default_factory=list)  # when, tokens so far
    seed: int = 0  # in use
    num_given_back: int = 0  # by a worker that left; asked again of another
    num_refused: int = 0  # `busy` before it was taken; asked again
    is_over: bool = False
    error: str = ""

    def silence_after_s(self, fault_s: float) -> float | None:
        """The pause that a fault made: from it to the first token that it held up."""
        before = fault_s
        for at_s, _ in self.batches:
            if at_s - before > 0.1:
                return at_s - before
            if at_s > fault_s + 1.0:
                return 0.0
            before = max(fault_s, at_s)
        return None


class Load:
    """Keeps `num_open` jobs open until `stop`, in turn over the doors."""

    def __init__(self, questions: Questions, num_open: int, rng: random.Random) -> None:
        self._questions = questions
        self._num_open = num_open
        self._rng = rng
        self._clients: dict[str, AsyncClient] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.logs: list[JobLog] = []
        self.worker_of: Callable[[str], str] = lambda door: ""  # of a ZeroMQ door

    def add_door(self, name: str, client: AsyncClient) -> None:
        """name: `redis`, or `zmq:` or `durable:` and the worker's number."""
        self._clients[name] = client

    def start(self) -> None:
        """Open the first jobs."""
        doors = list(self._clients)
        for i in range(self._num_open):
            door = doors[i % len(doors)]
            self._tasks.append(asyncio.create_task(self._keep_one_open(door)))

    def open_logs(self) -> list[JobLog]:
        """Jobs that have tokens and no end."""
        return [log for log in self.logs if log.batches and not log.is_over]

    async def stop(self, timeout_s: float) -> None:
        """No new jobs; wait for the open ones."""
        self._is_stopping = True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _keep_one_open(self, door: str) -> None:
        while not self._is_stopping:
            question = self._questions.draw(self._rng)
            job = f"{self._rng.getrandbits(96):024x}"
            log = JobLog(door, question, job)
            self.logs.append(log)
            while not log.is_over:
                await self._ask(log)

    async def _ask(self, log: JobLog) -> None:
        """Follow the job to its end. A worker that leaves may give a plain ZeroMQ job back, to be
        asked again with what came of it: of another worker.
        """
        options = {**log.question.options, "job": log.job}
        if log.door.startswith("durable"):
            options["durable"] = True
        if log.batches:
            options["have"] = [i for event in log.seen for i in event.ids]
            options.setdefault("seed", log.seed)
        try:
            await self._follow(self._clients[log.door].generate(**options), log)
            log.is_over = True
        except TokenbusError as error:
            if isinstance(error, Draining) and log.door.startswith("zmq"):
                log.num_given_back += 1
                doors = [door for door in self._clients if door.startswith("zmq")]
                log.door = doors[(doors.index(log.door) + 1) % len(doors)]
                await asyncio.sleep(0.2)
                return
            if isinstance(error, Busy) and not log.batches:  # not taken: asked again, as it says
                log.num_refused += 1
                await asyncio.sleep((error.retry_ms or 1_000) / 1_000)
                return
            num_tokens = log.batches[-1][1] if log.batches else 0
            log.error = f"{error.code}: {error}"
            log.seen.append(Seen(log.job, "error", seq=num_tokens))
            log.is_over = True

    async def _follow(self, stream: JobStream, log: JobLog) -> None:
        num_tokens = log.batches[-1][1] if log.batches else 0
        while batch := await stream.next_batch():
            now_s = time.monotonic()
            for tokens in batch:
                num_tokens += len(tokens.ids)
                name = "tokens" if tokens.ids else "text"
                log.seen.append(
                    Seen(log.job, name, tokens.attempt, tokens.seq, tokens.ids, tokens.text)
                )
            log.batches.append((now_s, num_tokens))
            if stream.started is not None:
                log.seed = stream.started.seed
            if log.door == "redis" and stream.started is not None:
                log.worker = stream.started.worker
            elif log.door.startswith("zmq"):
                log.worker = self.worker_of(log.door)
        done = stream.done
        assert done is not None, f"the stream of {log.job} ended without an end"
        usage = done.usage.completion_tokens
        log.seen.append(
            Seen(
                log.job,
                "done",
                done.attempt,
                done.seq,
                crc=done.crc,
                completion_tokens=usage,
            )
        )
