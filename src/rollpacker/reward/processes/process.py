"""A grading process as the driver sees it: started, given jobs, timed, killed."""

from __future__ import annotations

import pickle
import struct
import subprocess
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.processes.children import kill_child, start_child
from rollpacker.processes.frames import HEADER, Channel, frame
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.processes.rows import LARGE, Row, SentRows

JOB = struct.Struct("<Q")
"""A job's number, from 1 on, at the head of its frame."""
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
class GradingProcess:
    """One process and the jobs that it holds, the running one first.

    Args:
        popen: the process.
        channel: its socket.
        started: when it was started.
        jobs: what it was sent and has not answered.
        call_started: latest time at which its current call can have begun.
        ready: whether its functions are loaded.
        start_s: seconds that loading them took.
    """

    popen: subprocess.Popen[bytes]
    channel: Channel
    started: float
    jobs: deque[GradingJob] = field(default_factory=deque)
    call_started: float = 0.0
    ready: bool = False
    start_s: float = 0.0

    def send(self, jobs: Sequence[bytes]) -> None:
        """Write frames; with ``channel.unsent``, ``flush`` must follow."""
        self.channel.send(b"".join(jobs))

    def kill(self) -> str:
        """End the process and what it started, and say how it ended."""
        self.channel.close()
        return kill_child(self.popen)


def start(functions: Sequence[Loaded], tokenizer: bytes, checked: bool) -> GradingProcess:
    """Start a process that loads these functions and then takes jobs; ``channel.flush`` may have to
    follow.

    ``tokenizer`` is pickled: what decodes responses, or None. ``checked`` says that such a process
    has found its sandbox to hold on this machine.
    """
    popen, ours = start_child("rollpacker.reward.processes.worker")
    channel = Channel(ours)
    channel.send(frame(pickle.dumps((list(functions), tokenizer, checked))))
    return GradingProcess(popen=popen, channel=channel, started=time.monotonic())
