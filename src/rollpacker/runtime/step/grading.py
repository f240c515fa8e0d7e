"""From a response that has finished to the event of its grade."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.data.base import Row
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import GENERATING, Trajectory, TrajectoryStage
from rollpacker.runtime.attempts.carried import KnownResponse
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.step.step import StepRecord

_AT_ONCE = 512
"""Responses sent to the rewards at a time, those of a synchronous round for one: the rest follow
when the first grades have come."""


class Graders(Protocol):
    """Turns responses into rewards."""

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on."""
        ...

    @property
    def needs_group(self) -> bool:
        """Whether the responses of a prompt must be graded together."""
        ...

    def listen(self, take: Callable[[Sequence[Grade]], None]) -> AbstractContextManager[None]:
        """Give grades to this one while the context lasts."""
        ...

    def begin_step(self, step: int, epoch: float | None = None) -> None:
        """How far the run is from now on."""
        ...

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        """Start grading; never waits. With ``needs_group``, one prompt's responses a call."""
        ...

    def recall(self, prompt: PromptId, grade: Grade) -> None:
        """Learn from a grade that a response has from the step before."""
        ...

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; its grade is no longer wanted."""
        ...

    def pending(self) -> Mapping[AttemptId, float]:
        """What is being waited for, and for how many seconds."""
        ...

    def end_step(self) -> list[str]:
        """A step is over; returns what failed in it and was mended."""
        ...


class Grading:
    """Sends responses to the rewards and turns grades into events.

    Args:
        rewards: grades responses.
        problems: their rows.
        known: what there is of a sample of a prompt from before, if anything.
        lockstep: grades become events when all that was sent is graded, in a fixed order.
        post: takes the events.
        clock: seconds since the run began.
    """

    def __init__(
        self,
        rewards: Graders,
        problems: Problems,
        *,
        known: Callable[[PromptId, int], KnownResponse | None],
        lockstep: bool,
        post: Callable[..., None],
        clock: Clock,
    ) -> None:
        self._rewards = rewards
        self._problems = problems
        self._known = known
        self._lockstep = lockstep
        self._post = post
        self._clock = clock
        self._record = StepRecord(step=0, start_s=0.0)
        self._waiting: list[Trajectory] = []
        self._grades: list[Grade] = []

    def begin(self, record: StepRecord) -> None:
        self._record = record
        epoch = self._problems.source.passed if record.training else None
        self._rewards.begin_step(record.step, epoch)

    def add(self, attempt: Trajectory) -> None:
        """A response is to be graded with the next ``send``."""
        self._waiting.append(attempt)

    def send(self) -> None:
        """Grade what has finished; whole groups where a reward compares responses."""
        self._waiting = [a for a in self._waiting if a.stage is TrajectoryStage.GRADING]
        if not self._waiting:
            return
        if self._rewards.needs_group:
            self._send_groups()
            return
        most = len(self._waiting) if self._lockstep else _AT_ONCE
        waiting, self._waiting = self._waiting[:most], self._waiting[most:]
        self._give([attempt for attempt in waiting if not self._recall(attempt)])
        if not self._lockstep:
            self._post_grades()

    def _give(self, attempts: Sequence[Trajectory]) -> None:
        self._rewards.grade(attempts, self._problems.rows, training=self._record.training)

    def _send_groups(self) -> None:
        if not self._record.training:
            alone, self._waiting = self._waiting, []
            for attempt in alone:
                self._give([attempt])
            return
        # Responses that end in the same engine step are all told before anything is sent.
        attempts = self._record.attempts.values()
        unfinished = {a.prompt for a in attempts if a.stage in GENERATING}
        for prompt in {attempt.prompt: None for attempt in self._waiting}:
            if prompt not in unfinished:
                self._give([a for a in self._waiting if a.prompt == prompt])
                self._waiting = [a for a in self._waiting if a.prompt != prompt]

    def _recall(self, attempt: Trajectory) -> bool:
        """Take the grade from before, if there is one."""
        known = self._known(attempt.prompt, attempt.index)
        grade = None if known is None else known.grade_of(attempt.id)
        if grade is None:
            return False
        self._rewards.recall(attempt.prompt, grade)
        self._grades.append(grade)
        return True

    def take(self, grades: Sequence[Grade]) -> None:
        """Grades have come. Raises ``ValueError`` when no others can."""
        if (broken := self._rewards.broken) is not None:
            raise ValueError(broken)
        self._grades.extend(grades)
        if not self._lockstep:
            self._post_grades()
        if self._waiting:
            self.send()

    def settle(self) -> bool:
        """Whether nothing is being graded; in lockstep, only then grades become events."""
        while self._grades and not self._rewards.pending():
            self._grades.sort(key=lambda grade: grade.attempt)
            self._post_grades()
        return not self._rewards.pending()

    def _post_grades(self) -> None:
        events = [e for grade in self._grades for e in self._events(grade)]
        self._grades.clear()
        self._post(*events)

    def _events(self, grade: Grade) -> list[ev.AttemptGraded | ev.GradingFailed]:
        attempt = self._record.attempts.get(grade.attempt)
        if attempt is None or attempt.stage is not TrajectoryStage.GRADING:
            return []
        attempt.graded_s = self._clock()
        attempt.rewards, attempt.runs = grade.rewards, grade.runs
        attempt.extra, attempt.metrics = grade.extra, grade.metrics
        if grade.error is not None:
            attempt.stage, attempt.verdict = TrajectoryStage.OVER, "failed"
            self._record.faults.append(f"reward of prompt {attempt.prompt}: {grade.error}")
            return [ev.GradingFailed(attempt=attempt.id, error=grade.error)]
        attempt.stage, attempt.reward = TrajectoryStage.GRADED, grade.reward
        return [ev.AttemptGraded(attempt=attempt.id, reward=grade.reward)]


def logged_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Means of what reward functions logged with these responses, by metric."""
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in attempt.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in sorted(values.items())}
