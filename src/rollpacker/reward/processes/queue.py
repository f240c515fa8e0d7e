"""The queue in front of the grading processes: jobs made, joined, cut into batches, tried again.

Jobs are taken in order of arrival. Waiting jobs of a reward with ``batch`` share a call. If it
fails, each of its responses is tried alone. If a function fails every time, the run stops or drops
it (``on_error``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from rollpacker.config import RewardConfig
from rollpacker.errors import one_line
from rollpacker.policy.grading import RewardFaults
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.processes.ledger import ScoreLedger
from rollpacker.reward.processes.process import GradingJob, RowFiles

_BATCH_S = 0.05
"""Seconds of work sent to a process at a time: short enough to share out and to cancel."""
_LARGEST_BATCH = 256
_FIRST_GUESS_S = 0.01

TIMED_OUT = "timed out"  # the error of a call that took too long


class Waiting:
    """The queue of a pool."""

    def __init__(
        self, rewards: Sequence[RewardConfig], ledger: ScoreLedger, retries: int, *, join: bool
    ) -> None:
        self._rewards = tuple(rewards)
        self._ledger = ledger
        self._retries = retries
        self._sizes = [reward.call_size if join else 1 for reward in rewards]
        # A program may take long, so no other job is queued behind it.
        self._largest_batch = 1 if any(r.runs_programs for r in rewards) else _LARGEST_BATCH
        self._call_s = _FIRST_GUESS_S
        self._jobs: deque[GradingJob] = deque()
        self.rows = RowFiles()
        self._next_job = 0
        programs = [index for index, reward in enumerate(rewards) if reward.runs_programs]
        self._faults = RewardFaults(len(rewards), patient=programs)
        self._errors = [""] * len(rewards)
        self._dropped: set[int] = set()
        self._applying: dict[tuple[str, bool], list[int]] = {}
        self.broken: str | None = None  # why the run cannot go on

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, requests: Sequence[GradeRequest]) -> None:
        """Queue the calls of responses: all of one prompt if a reward needs the group."""
        for request in requests:
            each = self._functions(request.domain, needs_group=False)
            grouped = self._functions(request.domain, needs_group=True)
            self._ledger.hold(request.attempt, len(each) + len(grouped))
            if plain := [i for i in each if self._sizes[i] == 1]:
                self._queue((request,), plain)
            for function in each:
                if self._sizes[function] > 1:
                    self._queue((request,), [function])
        if requests and (grouped := self._functions(requests[0].domain, needs_group=True)):
            self._queue(tuple(requests), grouped)

    def put_back(self, jobs: Sequence[GradingJob]) -> None:
        self._jobs.extendleft(reversed(jobs))

    def give_up(self, error: str) -> None:
        while self._jobs:
            self._ledger.fail(self._jobs.popleft(), error)

    def clear(self) -> None:
        self._jobs.clear()
        self.rows.forget()

    # -- jobs for a process

    def share(self, idle: int) -> int:
        """Return how many jobs each of ``idle`` processes should take now."""
        most = min(self._largest_batch, max(1, int(_BATCH_S / max(self._call_s, 1e-6))))
        return min(most, math.ceil(len(self._jobs) / idle))

    def any_for(self, idle: Iterable[object], processes: Collection[object]) -> bool:
        return any(_may_try(process, job, processes) for process in idle for job in self._jobs)

    def take(
        self, process: object, count: int, processes: Collection[object]
    ) -> list[tuple[GradingJob, bytes]]:
        """Return at most ``count`` jobs for one of the ``processes``, with their frames."""
        taken: list[tuple[GradingJob, bytes]] = []
        elsewhere: list[GradingJob] = []
        while self._jobs and len(taken) < count:
            if taken and self._goes_alone(self._jobs[0]):
                break
            job = self._next()
            if not self._ledger.wanted(job):
                continue
            if not _may_try(process, job, processes):
                elsewhere.append(job)
                continue
            job = self._joined(job)
            try:
                taken.append((job, job.encode(self.rows)))
            except Exception as error:  # pickle raises the errors of the column's own code
                self._unsendable(job, error)
                continue
            if self._goes_alone(job):
                break
        self._jobs.extend(elsewhere)
        return taken

    def _next(self) -> GradingJob:
        # The oldest job. While a function fails every time, prefer a prompt that it has not tried.
        for function in self._faults.suspects():
            for place, job in enumerate(self._jobs):
                fresh = not self._faults.tried(function, job.requests[0].source)
                if job.functions[0] == function and fresh:
                    del self._jobs[place]
                    return job
        return self._jobs.popleft()

    def _goes_alone(self, job: GradingJob) -> bool:
        # A failed job may take its process down again. A job that may be joined would hold up the
        # jobs behind it, and those could not join later ones.
        return job.failures > 0 or self._size(job) > 1

    def _joined(self, first: GradingJob) -> GradingJob:
        size = self._size(first)
        if size == 1 or first.failures:
            return first
        requests = list(first.requests)
        passed: list[GradingJob] = []
        while self._jobs and len(requests) < size:
            job = self._jobs.popleft()
            if job.failures or job.functions != first.functions:
                passed.append(job)
            elif self._ledger.wanted(job):
                requests += job.requests
        self.put_back(passed)
        return GradingJob(first.id, tuple(requests), first.functions)

    def _unsendable(self, job: GradingJob, error: Exception) -> None:
        if self._is_joined(job):
            self._split(job, None)
        else:
            self._ledger.fail(job, f"its data row cannot be sent: {one_line(error)}")

    # -- results of jobs

    def took(self, job: GradingJob, seconds: float) -> None:
        """Record the seconds of a call that was answered, even with an error."""
        if self._size(job) == 1:
            # A decaying maximum, so that no other job is batched behind a call that may be slow.
            self._call_s = max(seconds, 0.95 * self._call_s)

    def scored(self, function: int) -> None:
        self._faults.answered(function)

    def charge(self, job: GradingJob, error: str, process: object, way: str) -> str | None:
        """Count a job's failure: it waits again, or its responses get no reward. Returns a line for
        the user if it waits again or if a function is dropped."""
        if not self._ledger.wanted(job):
            return None
        function = job.functions[0]
        said = self._blame(job, error, way)
        if function in self._dropped:
            self._skip(job, function)
            return said
        error = f"reward '{self._ledger.names[function]}': {error}"
        if self._is_joined(job):
            self._split(job, process)
            return f"{error}: the responses of this call are graded again one by one"
        job.failures += 1
        job.failed_in = process
        if job.failures > self._retries:
            self._ledger.fail(job, error)
            return None
        self._jobs.append(job)
        return f"{error}: it is called again"

    def _blame(self, job: GradingJob, error: str, way: str) -> str | None:
        function, first = job.functions[0], job.requests[0]
        if self._is_joined(job) or function in self._dropped or self.broken is not None:
            return None
        self._errors[function] = error
        if not self._faults.failed(function, first.attempt, first.source, way):
            return None
        key = f"rewards.{function}"
        trouble = f"{self._trouble(function)}: {error}"
        if self._rewards[function].on_error == "stop":
            longer = f", give it longer ({key}.timeout_s)," if way == TIMED_OUT else ""
            skip = f"go on without it ({key}.on_error=skip)"
            self.broken = f"{key}: {trouble}: fix it{longer} or {skip}"
        elif len(self._dropped) + 1 == len(self._rewards):
            self.broken = f"{key}: {trouble}: without it there is no reward left"
        else:
            self._drop(function)
            return f"WARNING {trouble}: the run goes on without it ({key}.on_error=skip)"
        return None

    def trouble(self) -> str | None:
        """Return a line about functions that fail every time."""
        suspects = [i for i in self._faults.suspects() if i not in self._dropped]
        return "; ".join(map(self._trouble, suspects)) or None

    def _trouble(self, function: int) -> str:
        failed, tried = self._faults.counts(function)
        did = TIMED_OUT if self._errors[function].startswith(TIMED_OUT) else "failed"
        return f"reward '{self._ledger.names[function]}' {did} {failed} of {tried}"

    def _drop(self, function: int) -> None:
        self._dropped.add(function)
        self._applying.clear()
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if function in job.functions:
                self._skip(job, function)
            else:
                self._jobs.append(job)

    def _skip(self, job: GradingJob, function: int) -> None:
        job.functions.remove(function)
        job.failures = 0
        self._ledger.skip(job)
        if job.functions:
            self._jobs.append(job)

    def _split(self, job: GradingJob, process: object) -> None:
        for request in job.requests:
            self._queue((request,), job.functions)
            self._jobs[-1].failures = 1
            self._jobs[-1].failed_in = process

    def _is_joined(self, job: GradingJob) -> bool:
        return self._size(job) > 1 and len(job.requests) > 1

    # -- jobs

    def _size(self, job: GradingJob) -> int:
        return self._sizes[job.functions[0]]

    def _functions(self, domain: str, needs_group: bool) -> Sequence[int]:
        known = self._applying.get((domain, needs_group))
        if known is None:
            known = self._applying[domain, needs_group] = [
                index
                for index, reward in enumerate(self._rewards)
                if reward.needs_group == needs_group
                and reward.applies(domain)
                and index not in self._dropped
            ]
        return known

    def _queue(self, requests: tuple[GradeRequest, ...], functions: Sequence[int]) -> None:
        self._next_job += 1
        self._jobs.append(GradingJob(self._next_job, requests, list(functions)))


def _may_try(process: object, job: GradingJob, processes: Collection[object]) -> bool:
    return job.failed_in is not process or len(processes) == 1
