"""Grading in processes that may hang, crash or be killed without harm to other samples.

The pool belongs to one event loop (or to a caller that waits): responses are queued by
``submit``, sent to idle processes in batches and answered through a callback. A call that raises,
hangs or takes its process down is repeated ``grading.retries`` times, a call of several responses
once for each of them; then its response has no reward, and an error says why. What was queued
behind it is sent again and not charged.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.ledger import ScoreLedger
from rollpacker.reward.processes.process import GradingJob, GradingProcess, Loaded, start
from rollpacker.reward.processes.replies import GraderReply, read_reply
from rollpacker.reward.processes.waiting import TIMED_OUT, Waiting

OnGrades = Callable[[list[Grade]], None]

_COLLECT_S = 0.001
"""Pause after reading and sending, in which responses and replies gather: the first is handled at
once, those that follow are handled together."""
_MOST_SAID = 100
"""Lines for the user that are kept until they are told."""
_CHECK_S = 0.25
_START_S = 120.0
_CANCELLED_GRACE_S = 1.0
_STARTS = 5
_RESTARTS = 50
"""Failures in a row, once the functions have been loaded: then they are the machine's."""


class GradingPool:
    """Reward processes for one run.

    Args:
        rewards: the functions and their weights; a response's reward is the weighted sum.
        config: processes and retries.
        join: whether responses may share a call, as rewards with ``batch`` ask for.
        columns: for each reward, those of the rows that it applies to; None if not known.
        tokenizer: with it the processes decode what they grade; None: requests have their text.

    Raises ``ValueError`` when two rewards have one name.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        config: GradingConfig,
        *,
        join: bool = True,
        columns: Sequence[Collection[str]] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._rewards = tuple(rewards)
        known = [None] * len(rewards) if columns is None else [sorted(c) for c in columns]
        self._functions: list[Loaded] = [
            (r.function, r.options, c) for r, c in zip(rewards, known, strict=True)
        ]
        self._tokenizer = pickle.dumps(tokenizer)
        self._ledger = ScoreLedger(rewards)
        self._waiting = Waiting(rewards, self._ledger, config.retries, join=join)
        self._grouped = any(r.needs_group for r in rewards)
        self._said: list[str] = []
        self._failed_starts = 0
        self._fatal: str | None = None
        self._refused: str | None = None
        self._loaded = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_grades: OnGrades | None = None
        self._pause: asyncio.Handle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._processes = [self._start() for _ in range(config.workers)]

    # -- what the driver calls

    @property
    def needs_group(self) -> bool:
        """Whether all responses of a prompt must be submitted together, with ``group``."""
        return self._grouped

    def attach(self, loop: asyncio.AbstractEventLoop, on_grades: OnGrades) -> None:
        """Read replies in this loop and hand grades to ``on_grades``, many at a time."""
        assert self._loop is None, "the pool is attached already"
        self._loop = loop
        self._on_grades = on_grades
        for process in self._processes:
            self._flush_later(process)
        self._act()

    def wait_ready(self) -> None:
        """Wait until every process has loaded its functions.

        Raises ``ValueError`` when a function cannot be found or used.
        """
        while self._fatal is None and not all(p.ready for p in self._processes):
            self._pump(_CHECK_S)
        if self._fatal is not None:
            raise ValueError(self._fatal)

    def submit(self, requests: Sequence[GradeRequest], group: bool = False) -> None:
        """Queue responses; ``group`` says that they are all of one prompt, in order.

        Never waits. Attempts must not be held already.
        """
        assert group or not self._grouped, "a reward needs the group: submit whole groups"
        self._waiting.add(requests)
        if self._pause is None:
            self._act()

    def cancel(self, attempts: Collection[AttemptId]) -> None:
        """Forget attempts: no grade comes. Unknown ones are ignored."""
        for attempt in attempts:
            self._ledger.drop(attempt)
        for process in self._processes:
            running = process.jobs[0] if process.jobs else None
            if running is None or not self._rewards[running.functions[0]].shows_life:
                continue
            cancelled = any(request.attempt in attempts for request in running.requests)
            if cancelled and not self._ledger.wanted(running):
                self._write(process, [running.cancellation()])

    def end_step(self) -> None:
        """The rows that were sent are not kept for others."""
        for process, frames in self._waiting.rows.forget().items():
            assert isinstance(process, GradingProcess)
            self._write(process, frames)

    def pending(self) -> dict[AttemptId, float]:
        """Seconds since submission of every attempt whose grade is awaited."""
        return self._ledger.pending()

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on: a function that only fails, or that no process can load."""
        return self._fatal

    def trouble(self) -> str | None:
        """Which functions only fail, in words."""
        return self._waiting.trouble()

    def said(self) -> list[str]:
        """What the user should know and was not told yet: faults that were mended, warnings."""
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        """Kill the processes and forget everything that is pending."""
        for timer in (self._checking, self._pause):
            if timer is not None:
                timer.cancel()
        for process in self._processes:
            self._unlisten(process)
            process.kill()
        self._processes = []
        self._waiting.clear()
        self._ledger.clear()

    # -- jobs and results

    def _dispatch(self) -> None:
        if self._fatal is not None:
            self._waiting.give_up(self._fatal)
        idle = self._idle()
        if idle and self._waiting:
            share = self._waiting.share(len(idle))
            for process in idle:
                self._send(process, share)
        if self._ledger:
            self._check_later()
        self._deliver()

    def _send(self, process: GradingProcess, count: int) -> None:
        if taken := self._waiting.take(process, count, self._processes):
            process.jobs.extend(job for job, _ in taken)
            process.call_started = time.monotonic()
            self._write(process, [frame for _, frame in taken])

    def _idle(self) -> list[GradingProcess]:
        return [p for p in self._processes if p.ready and not p.jobs]

    def _write(self, process: GradingProcess, frames: Sequence[bytes]) -> None:
        process.send(frames)
        self._flush_later(process)

    def _on_reply(self, process: GradingProcess, payload: bytes) -> None:
        job = process.jobs[0] if process.jobs else None
        reply = read_reply(payload, job)
        if reply.fatal is not None:
            self._refused = reply.fatal
            self._fatal = None if self._loaded else reply.fatal
        elif reply.ready:
            process.ready = self._loaded = True
            process.start_s = time.monotonic() - process.started
            self._failed_starts = 0
        elif reply.say is not None:
            if len(self._said) < _MOST_SAID:
                self._said.append(reply.say)
        elif job is not None and reply.beat is not None:
            if self._rewards[job.functions[0]].shows_life:
                process.call_started = time.monotonic()
        elif job is not None:
            self._settle(process, job, reply)

    def _settle(self, process: GradingProcess, job: GradingJob, reply: GraderReply) -> None:
        self._waiting.took(job, reply.seconds)
        process.call_started = time.monotonic()
        if reply.error is not None:
            process.jobs.popleft()
            self._charge(job, reply.error, process, reply.way)
            return
        function = job.functions.pop(0)
        self._waiting.scored(function)
        if not job.functions:
            process.jobs.popleft()
        self._ledger.score(job, function, reply)

    def _charge(self, job: GradingJob, error: str, process: GradingProcess, way: str) -> None:
        mended = self._waiting.charge(job, error, process, way)
        if mended is not None:
            self._said.append(mended)
        self._fatal = self._fatal or self._waiting.broken

    def _deliver(self) -> None:
        if self._ledger.done and self._on_grades is not None:
            grades, self._ledger.done = self._ledger.done, []
            self._on_grades(grades)

    # -- processes

    def _start(self) -> GradingProcess:
        process = start(self._functions, self._tokenizer, self._loaded)
        self._flush_later(process)
        return process

    def _read(self, process: GradingProcess) -> None:
        gone = process.channel.hear(lambda payload: self._on_reply(process, payload))
        if gone is not None:
            self._replace(process, f"its process {gone}" if gone else None)

    def _replace(self, process: GradingProcess, reason: str | None) -> None:
        """Kill a process and start another; its running job is charged, the others wait again."""
        self._processes.remove(process)
        self._unlisten(process)
        self._waiting.rows.lost(process)
        ended = process.kill()
        reason = reason or f"its process {ended}"
        if process.jobs:
            running = process.jobs.popleft()
            self._waiting.put_back(process.jobs)
            # Kinds of faults: it took too long, or did something to its process.
            late = reason.startswith(TIMED_OUT)
            self._charge(running, reason, process, TIMED_OUT if late else "process")
        elif process.ready:
            self._said.append(f"a grading process that was idle {ended}")
        else:
            self._failed_starts += 1
            most = _RESTARTS if self._loaded else _STARTS
            if self._failed_starts >= most and self._fatal is None:
                last = self._refused or f"the last {ended}"
                self._fatal = f"rewards: grading processes do not start: {last}"
        if self._fatal is None:
            self._processes.append(self._start())
            if self._loop is not None and self._pause is None:
                self._pause = self._loop.call_soon(self._resume)

    def _check(self) -> None:
        """Replace processes whose call or start takes too long."""
        for process in tuple(self._processes):
            # A driver that was busy itself must not take answers that have come for a hang.
            self._read(process)
            if process not in self._processes:
                continue
            now = time.monotonic()
            if not process.ready and now - process.started > _START_S:
                if not self._loaded:
                    self._fatal = f"rewards: loading the functions takes more than {_START_S:g} s"
                self._replace(process, None)
            elif process.jobs and now - process.call_started > self._limit(
                process, process.jobs[0]
            ):
                limit = self._limit(process, process.jobs[0])
                self._replace(process, f"{TIMED_OUT} after {limit:g} s")

    def _limit(self, process: GradingProcess, job: GradingJob) -> float:
        limit = self._rewards[job.functions[0]].call_limit_s
        if self._ledger.wanted(job):
            return limit
        # To wait for a call that nobody wants is cheaper than to load a model again.
        return min(limit, max(_CANCELLED_GRACE_S, process.start_s))

    def _pump(self, timeout: float) -> None:
        """Wait for replies without a loop."""
        channels = [p.channel for p in self._processes]
        writing = [c for c in channels if c.unsent]
        select.select(channels, writing, [], timeout)
        for channel in writing:
            channel.flush()
        self._check()
        self._dispatch()

    # -- the event loop

    def _act(self) -> None:
        """Send what is queued, then pause; without a loop there is nothing to pause."""
        if self._loop is not None:
            # First, since the callback may submit again.
            self._pause = self._loop.call_later(_COLLECT_S, self._resume)
            for process in self._processes:
                self._loop.remove_reader(process.channel)
        self._dispatch()

    def _resume(self) -> None:
        assert self._loop is not None
        self._pause = None
        if self._waiting.any_for(self._idle(), self._processes):
            self._on_readable()
        else:
            self._listen()

    def _listen(self) -> None:
        assert self._loop is not None
        for process in self._processes:
            self._loop.add_reader(process.channel, self._on_readable)

    def _on_readable(self) -> None:
        for process in tuple(self._processes):
            self._read(process)
        if any(process.jobs for process in self._processes):
            self._act()
        else:
            self._listen()  # first, since a callback may submit again
            self._dispatch()

    def _unlisten(self, process: GradingProcess) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(process.channel)
            self._loop.remove_writer(process.channel)

    def _flush_later(self, process: GradingProcess) -> None:
        if self._loop is not None and process.channel.unsent:
            self._loop.add_writer(process.channel, self._on_writable, process)

    def _on_writable(self, process: GradingProcess) -> None:
        assert self._loop is not None
        if process.channel.flush():
            self._loop.remove_writer(process.channel)

    def _check_later(self) -> None:
        if self._loop is not None and self._checking is None:
            soon = min(_CHECK_S, *(r.call_limit_s / 4 for r in self._rewards))
            self._checking = self._loop.call_later(soon, self._on_check)

    def _on_check(self) -> None:
        self._checking = None
        self._check()
        self._dispatch()
