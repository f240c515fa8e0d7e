"""A grading process as the driver sees it: started, and given jobs."""

from __future__ import annotations

import pickle
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.processes.fork_server import fork_child
from rollpacker.processes.frames import HEADER, Channel, frame
from rollpacker.processes.supervised import SupervisedProcess
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.processes.rows import LARGE, Row, SentRows

JOB = struct.Struct("<Q")
"""A job's number, from 1 on, at the head of its frame."""
_BUILT_IN = {"code": "rollpacker.reward.code", "math": "rollpacker.reward.math"}
Loaded = tuple[str, dict[str, Any], list[str] | None]
"""A function that a process is to load: its path, its options, and the columns of its rows."""


@dataclass(slots=True, eq=False)
class GradingJob:
    """One call of each of some functions on the same requests.

    Args:
        id: unique within the pool.
        requests: one response, or all of a group.
        functions: indices of the reward functions still to call.
        failures: how often it has failed.
        failed_in: the process that it failed in last; another one should try it next.
    """

    id: int
    requests: tuple[GradeRequest, ...]
    functions: list[int]
    failures: int = 0
    failed_in: object = None

    def encode(self, rows: SentRows, process: object) -> bytes:
        """The job as a frame, behind those of large rows that ``process`` has not. Raises what
        pickle raises on columns that it cannot write."""
        if not rows:  # nearly always: it costs nothing to speak of
            plain = [_plain(r, r.row) for r in self.requests]
            body = pickle.dumps((self.functions, plain), pickle.HIGHEST_PROTOCOL)
            if len(body) < LARGE or not rows.learn(r.row for r in self.requests):
                return b"".join((HEADER.pack(JOB.size + len(body)), JOB.pack(self.id), body))
        body = self._body(rows)
        if len(body) >= LARGE and rows.learn(r.row for r in self.requests):
            body = self._body(rows)
        before = rows.frames((r.row for r in self.requests), process)
        return b"".join((*before, HEADER.pack(JOB.size + len(body)), JOB.pack(self.id), body))

    def _body(self, rows: SentRows) -> bytes:
        """With large rows as their numbers."""
        plain = [_plain(r, rows.number(r.row) or r.row) for r in self.requests]
        return pickle.dumps((self.functions, plain), pickle.HIGHEST_PROTOCOL)

    def cancellation(self) -> bytes:
        """The frame that cancels it."""
        return frame(JOB.pack(self.id))


def _plain(r: GradeRequest, row: Row | int) -> tuple[Any, ...]:
    ids = r.completion_ids
    packed = pickle.PickleBuffer(ids if isinstance(ids, memoryview) else array("i", ids))
    state = r.state
    progress = (state.global_step, state.max_steps, state.epoch, state.num_train_epochs)
    times = tuple(r.timeouts_s)
    return r.attempt, r.prompt, r.completion, packed, row, times, progress, r.messages


@dataclass(slots=True, eq=False)
class GradingProcess(SupervisedProcess):
    """One process and the jobs that it holds, the running one first.

    Args:
        jobs: what it was sent and has not answered.
        call_started: latest time at which its current call can have begun.
        start_s: seconds that loading its functions took.
    """

    jobs: deque[GradingJob] = field(default_factory=deque)
    call_started: float = 0.0
    start_s: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether it holds jobs."""
        return bool(self.jobs)


def _preloaded(functions: Sequence[Loaded]) -> list[str]:
    """What each process would import for itself; libraries of models take devices, and are not
    for that."""
    built_in = (_BUILT_IN[name] for name, _, _ in functions if name in _BUILT_IN)
    return ["rollpacker.reward.processes.worker", "tokenizers", *sorted(built_in)]


def start(functions: Sequence[Loaded], read: bytes, checked: bool) -> GradingProcess:
    """Start a process that loads these functions and then takes jobs; ``channel.flush`` may have to
    follow.

    ``read`` is pickled: a ``ResponseText``, or None. ``checked`` says that such a process
    has found its sandbox to hold on this machine.
    """
    popen, ours = fork_child("rollpacker.reward.processes.worker", _preloaded(functions))
    channel = Channel(ours)
    channel.send(frame(pickle.dumps((list(functions), read, checked))))
    return GradingProcess(popen=popen, channel=channel, started=time.monotonic())
