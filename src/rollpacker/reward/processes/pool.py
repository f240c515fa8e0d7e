"""Grading in processes that may hang, crash or be killed without harm to other samples.

The pool belongs to one event loop, or to a caller that waits. A call that raises, hangs or kills
its process is repeated ``grading.retries`` times. A call of several responses, once for each of
them. If all attempts fail, the response has no reward, and an error says why. Jobs queued after a
failed one are sent again and not charged.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Collection, Sequence

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.processes.supervised import CHECK_S, SupervisedPool
from rollpacker.response_text import ResponseText
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.ledger import GraderReply, ScoreLedger, read_reply
from rollpacker.reward.processes.process import GradingJob, GradingProcess, Loaded, start
from rollpacker.reward.processes.queue import TIMED_OUT, Waiting

OnGrades = Callable[[list[Grade]], None]

_COLLECT_S = 0.001
"""Pause in which responses and replies gather. The first one is handled at once, the next
together."""
_START_S = 120.0
_CANCELLED_GRACE_S = 1.0
_STARTS = 5
_RESTARTS = 50
"""Failures in a row once the functions have been loaded: then the machine is at fault."""


class GradingPool(SupervisedPool[GradingProcess]):
    """Reward processes for one run. Raises ``ValueError`` if two rewards have one name.

    Args:
        join: whether responses may share a call of a reward with ``batch``.
        columns: for each reward, those of the rows that it applies to, or None if not known.
        read: lets the processes decode responses. None: requests have their text.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        config: GradingConfig,
        *,
        join: bool = True,
        columns: Sequence[Collection[str]] | None = None,
        read: ResponseText | None = None,
    ) -> None:
        super().__init__(
            "rewards: grading processes",
            _STARTS,
            min((CHECK_S, *(reward.call_limit_s / 4 for reward in rewards))),
        )
        self._count = config.workers
        self._rewards = tuple(rewards)
        known = [None] * len(rewards) if columns is None else [sorted(c) for c in columns]
        self._functions: list[Loaded] = [
            (r.function, r.options, c) for r, c in zip(rewards, known, strict=True)
        ]
        self._reader = pickle.dumps(read)
        self._ledger = ScoreLedger(rewards)
        self._waiting = Waiting(rewards, self._ledger, config.retries, join=join)
        self._grouped = any(r.needs_group for r in rewards)
        self._loaded = False
        self._on_grades: OnGrades | None = None
        self._pause: asyncio.Handle | None = None
        self._fill()

    # -- calls of the driver

    @property
    def needs_group(self) -> bool:
        """Whether all responses of a prompt must be submitted together, with ``group``."""
        return self._grouped

    def attach(self, loop: asyncio.AbstractEventLoop, on_grades: OnGrades) -> None:
        """Read replies in this loop and hand grades to ``on_grades``, many at a time."""
        assert self._loop is None, "the pool is attached already"
        self._loop = loop
        self._on_grades = on_grades
        for process in self._members:
            self._flush_later(process)
        self._act()

    def submit(self, requests: Sequence[GradeRequest], group: bool = False) -> None:
        """Queue responses. ``group``: they are all of one prompt, in order. Never waits. Attempts
        must not be held already."""
        assert group or not self._grouped, "a reward needs the group: submit whole groups"
        self._waiting.add(requests)
        if self._pause is None:
            self._act()

    def cancel(self, attempts: Collection[AttemptId]) -> None:
        """Forget attempts: no grade comes. Unknown ones are ignored."""
        for attempt in attempts:
            self._ledger.drop(attempt)
        for process in self._members:
            running = process.jobs[0] if process.jobs else None
            if running is None or not self._rewards[running.functions[0]].shows_life:
                continue
            cancelled = any(request.attempt in attempts for request in running.requests)
            if cancelled and not self._ledger.wanted(running):
                self._write(process, [running.cancellation()])

    def end_step(self) -> None:
        """Forget the files of large rows, which are not expected to come again."""
        self._waiting.rows.forget()

    def pending(self) -> dict[AttemptId, float]:
        """Return the seconds since submission of every attempt whose grade is awaited."""
        return self._ledger.pending()

    def trouble(self) -> str | None:
        return self._waiting.trouble()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        super().close()
        self._waiting.clear()
        self._ledger.clear()

    # -- jobs and results

    def _go_on(self) -> None:
        if self.broken is not None:
            self._waiting.give_up(self.broken)
        idle = self._idle()
        if idle and self._waiting:
            share = self._waiting.share(len(idle))
            for process in idle:
                self._send(process, share)
        if self._ledger:
            self._check_later()
        self._deliver()

    def _send(self, process: GradingProcess, count: int) -> None:
        if taken := self._waiting.take(process, count, self._members):
            process.jobs.extend(job for job, _ in taken)
            process.call_started = time.monotonic()
            self._write(process, [frame for _, frame in taken])

    def _idle(self) -> list[GradingProcess]:
        return [p for p in self._members if p.ready and not p.jobs]

    def _heard(self, member: GradingProcess, data: bytes) -> None:
        job = member.jobs[0] if member.jobs else None
        reply = read_reply(data, job)
        if reply.fatal is not None:
            self._refused = reply.fatal
            if not self._loaded:
                self.broken = reply.fatal
        elif reply.ready:
            self._is_ready(member)
            self._loaded, self._most_starts = True, _RESTARTS
            member.start_s = time.monotonic() - member.started
        elif reply.say is not None:
            self._say(reply.say)
        elif job is not None and reply.beat is not None:
            if self._rewards[job.functions[0]].shows_life:
                member.call_started = time.monotonic()
        elif job is not None:
            self._settle(member, job, reply)

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
        self.broken = self.broken or self._waiting.broken

    def _deliver(self) -> None:
        if self._ledger.done and self._on_grades is not None:
            grades, self._ledger.done = self._ledger.done, []
            self._on_grades(grades)

    # -- processes

    def _new(self) -> GradingProcess:
        return start(self._functions, self._reader, self._loaded)

    def _missing(self) -> int:
        return self._count - len(self._members)

    def _late(self, member: GradingProcess, now: float) -> str | None:
        if not member.ready and now - member.started > _START_S:
            if not self._loaded:
                self.broken = f"rewards: loading the functions takes more than {_START_S:g} s"
            return ""
        if not member.jobs:
            return None
        limit = self._limit(member, member.jobs[0])
        return f"{TIMED_OUT} after {limit:g} s" if now - member.call_started > limit else None

    def _lost(self, member: GradingProcess, why: str, ended: str) -> None:
        if member.jobs:
            running = member.jobs.popleft()
            self._waiting.put_back(member.jobs)
            # Two kinds of faults: the call took too long, or its process ended.
            late = why.startswith(TIMED_OUT)
            error = why if late else f"its process {why or ended}"
            self._charge(running, error, member, TIMED_OUT if late else "process")
        elif member.ready:
            self._said.append(f"a grading process that was idle {ended}")

    def _working(self) -> bool:
        return bool(self._ledger)

    def _limit(self, process: GradingProcess, job: GradingJob) -> float:
        limit = self._rewards[job.functions[0]].call_limit_s
        if self._ledger.wanted(job):
            return limit
        # Waiting for an unwanted call is cheaper than loading a model again.
        return min(limit, max(_CANCELLED_GRACE_S, process.start_s))

    # -- the event loop

    def _act(self) -> None:
        if self._loop is not None:
            # Set the pause first: the callback may submit again.
            self._pause = self._loop.call_later(_COLLECT_S, self._resume)
            for process in self._members:
                self._loop.remove_reader(process.channel)
        self._go_on()

    def _resume(self) -> None:
        assert self._loop is not None
        self._pause = None
        if self._waiting.any_for(self._idle(), self._members):
            self._on_readable()
        else:
            self._listen_to_all()

    def _listen(self, member: GradingProcess) -> None:
        super()._listen(member)
        if self._loop is not None and self._pause is None:
            self._pause = self._loop.call_soon(self._resume)

    def _listen_to_all(self) -> None:
        assert self._loop is not None
        for process in self._members:
            self._loop.add_reader(process.channel, self._on_readable)

    def _on_readable(self) -> None:
        for process in tuple(self._members):
            self._read(process)
        if any(process.jobs for process in self._members):
            self._act()
        else:
            self._listen_to_all()  # before the callback, which may submit again
            self._go_on()
