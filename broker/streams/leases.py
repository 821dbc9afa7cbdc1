"""Keeping what is ours: leases renewed while the engine makes progress, and signs of life.

An engine that hangs stops the progress counter, so its jobs' leases run out and other workers go
on with them; a long job on a live engine keeps its lease for as long as it takes. So do the jobs
of an engine that died, while the next one loads: this worker knows whom to suspect, where another
one would have to charge the crash to all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

from broker.streams.jobs import Job, Stage
from broker.streams.lane import LinkLost, ReplyError
from broker.streams.scripts import script
from broker.streams.state import UNFINISHED_TTL_MS, DoorState
from tokenbus._version import __version__
from tokenbus.keys import GROUP

log = structlog.get_logger("broker.streams")

JOBS_PER_SCRIPT = 64
BEAT_S = 1.0
FORGET_AFTER_MS = 300_000
BEATS_PER_CLEANING = 60


class Leases:
    """Renews the leases of all jobs in hand."""

    def __init__(self, state: DoorState, on_no_group: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        self._on_no_group = on_no_group
        self._progress_at = 0.0

    def on_progress(self, progress: int) -> None:
        """The engine's step counter, as last reported."""
        if progress != self._state.progress:
            self._state.progress = progress
            self._progress_at = self._state.now()

    def is_engine_alive(self) -> bool:
        """The engine is ready and its loop has turned within the last renewal period."""
        age_s = self._state.now() - self._progress_at
        return self._state.is_engine_ready and age_s * 1000 <= self._state.redis.renew_ms

    async def run(self) -> None:
        """Renew each renew_ms, for ever."""
        period_s = self._state.redis.renew_ms / 1000
        while True:
            await asyncio.sleep(period_s * random.uniform(0.8, 1.0))
            await self._state.link.up.wait()
            try:
                await self.renew()
                self._state.clear_trouble("renew")
            except LinkLost:
                continue
            except ReplyError as error:
                if error.is_no_group:
                    await self._on_no_group()
                else:
                    self._state.report_trouble("renew", error)

    async def renew(self) -> None:
        """One round. Jobs that only wait for their last entry to be written need no engine.

        Raises LinkLost or ReplyError.
        """
        is_alive = self.is_engine_alive() or self._state.is_engine_loading
        for stream in self._state.streams:
            jobs = [
                job
                for job in self._state.jobs.entries_of(stream)
                if is_alive or job.stage is Stage.ENDING
            ]
            for i in range(0, len(jobs), JOBS_PER_SCRIPT):
                await self._renew_some(stream, jobs[i : i + JOBS_PER_SCRIPT])

    async def _renew_some(self, stream: str, jobs: Sequence[Job]) -> None:
        state, keys = self._state, self._state.keys
        asked_at = state.now()
        names, args = [stream], [GROUP, state.worker, str(UNFINISHED_TTL_MS)]
        for job in jobs:
            names.extend((keys.job(job.id), keys.out(job.id)))
            args.extend((job.entry, str(job.attempt) if job.attempt else ""))
        for job, kept in zip(
            jobs, await state.link.call(*script("renew", names, args)), strict=True
        ):
            if not state.jobs.is_held(job):
                continue
            if kept:
                if job.lease_end <= state.now():
                    state.pause(job, False)
                job.lease_end = state.new_lease_end(asked_at)
            else:
                state.lose(job, "the lease ran out and another worker took the entry")


class Heartbeat:
    """Writes this worker's line into the workers hash; its silence tells that Redis is gone."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self._count = 0
        self._host = socket.gethostname()

    async def run(self) -> None:
        """A beat a second while the link is up."""
        while True:
            await self._state.link.up.wait()
            try:
                await self.beat()
                self._state.clear_trouble("heartbeat")
                self._state.clear_when_idle()
            except LinkLost:
                pass  # the link says so itself
            except ReplyError as error:
                self._state.report_trouble("heartbeat", error)
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """One line. Raises LinkLost or ReplyError."""
        state = self._state
        about = {
            "capacity": state.slots + len(state.jobs) - state.jobs.num_unsettled,
            "load": len(state.jobs),
            "ready": state.is_engine_ready and not state.troubles,
            "draining": state.is_draining,
            "model": state.config.model_name,
            "version": __version__,
            "host": self._host,
            "pid": os.getpid(),
            "vitals": state.vitals,
        }
        forget = FORGET_AFTER_MS if self._count % BEATS_PER_CLEANING == 0 else ""
        self._count += 1
        keys = (state.keys.workers, *state.streams)
        args = (GROUP, state.worker, json.dumps(about, separators=(",", ":")), forget)
        await state.link.call(*script("heartbeat", keys, args))

    async def leave(self) -> None:
        """Take the line back, and the consumer where it holds nothing. Raises LinkLost."""
        keys = (self._state.keys.workers, *self._state.streams)
        await self._state.link.run([script("leave", keys, (GROUP, self._state.worker))])
