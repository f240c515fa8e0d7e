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
from rollpacker.reward.processes.rows import LARGE, RowFile, RowFiles

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
        files: of large rows, which must stay until the job is over.
    """

    id: int
    requests: tuple[GradeRequest, ...]
    functions: list[int]
    failures: int = 0
    failed_in: object = None
    files: list[RowFile | None] = field(default_factory=list[RowFile | None])

    def encode(self, rows: RowFiles) -> bytes:
        """The job as a frame. Raises what pickle raises on columns that it cannot write."""
        body = self._body(rows)
        if len(body) >= LARGE and rows.add(r.row for r in self.requests):
            body = self._body(rows)
        return b"".join((HEADER.pack(JOB.size + len(body)), JOB.pack(self.id), body))

    def _body(self, rows: RowFiles) -> bytes:
        self.files = [rows.of(r.row) for r in self.requests]
        plain = list(map(_plain, self.requests, self.files))
        return pickle.dumps((self.functions, plain), pickle.HIGHEST_PROTOCOL)

    def cancellation(self) -> bytes:
        """The frame that cancels it."""
        return frame(JOB.pack(self.id))


def _plain(r: GradeRequest, file: RowFile | None) -> tuple[Any, ...]:
    row = r.row if file is None else file.path
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
