"""A trainer's own reward functions, called while other responses still decode."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.data.base import Row
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Trajectory

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True, slots=True)
class TrainerReward:
    """A reward function of the trainer."""

    name: str
    call: Callable[..., Any]
    weight: float

    @property
    def asynchronous(self) -> bool:
        call = self.call
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            getattr(call, "__call__", None)  # noqa: B004
        )


@dataclass(slots=True)
class Logged:
    """One response's scores, and what functions logged with it."""

    prompt: PromptId
    since: float
    scores: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class TrainerRewards:
    """Calls functions as TRL does, with the responses that have finished (``Graders``).

    Plain functions run one after the other in ``threads`` threads, with all responses that have
    finished meanwhile. Coroutines run at once, on the trainer's own loop. A function's error ends
    the round.

    Args:
        functions: those that are called early. Empty if the trainer calls all of them.
        decode: token ids to the functions' completions.
        state: the trainer's state, for functions that ask for it.
        loop: of the trainer's coroutines, if there are any.
    """

    needs_group = False

    def __init__(
        self,
        functions: Sequence[TrainerReward],
        *,
        decode: Callable[[Any, Sequence[Any]], list[Any]],
        state: Any,
        loop: asyncio.AbstractEventLoop | None,
        threads: int,
    ) -> None:
        self._functions = functions
        self._plain = [n for n, each in enumerate(functions) if not each.asynchronous]
        self._coroutines = [n for n, each in enumerate(functions) if each.asynchronous]
        self._decode, self._state, self._loop = decode, state, loop
        self._threads = ThreadPoolExecutor(threads, "rewards")
        self._most, self._runners, self._calling = threads, 0, 0
        self._waiting: list[tuple[Trajectory, Row]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._of: dict[AttemptId, Logged] = {}
        self._open: set[AttemptId] = set()
        self._take: Callable[[Sequence[Grade]], None] = lambda _grades: None
        self.error: Exception | None = None  # of a function

    @property
    def broken(self) -> str | None:
        return None if self.error is None else f"a reward function raised: {self.error}"

    @contextlib.contextmanager
    def listen(self, take: Callable[[Sequence[Grade]], None]) -> Iterator[None]:
        self._take = take
        try:
            yield
        finally:
            self._take = lambda _grades: None

    def begin_step(self, step: int, epoch: float | None = None) -> None:
        del step, epoch
        self._of.clear()
        self._open.clear()
        self._waiting.clear()

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        del training
        batch = [(attempt, rows[attempt.prompt]) for attempt in attempts]
        if not batch:
            return
        now = time.monotonic()
        for attempt, _ in batch:
            self._of[attempt.id] = Logged(attempt.prompt, now)
            self._open.add(attempt.id)
        if not self._functions:
            asyncio.get_running_loop().call_soon(self._finish, batch)
            return
        for number in self._coroutines:
            self._begin(self._call(number, batch, threaded=False))
        if self._plain:
            self._waiting += batch
            for _ in range(min(self._most - self._runners, len(self._waiting))):
                self._runners += 1
                self._begin(self._call_waiting())

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_waiting(self) -> None:
        try:
            while self._waiting:
                count = -(-len(self._waiting) // (self._most - self._calling))
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                self._calling += 1
                for number in self._plain:
                    await self._call(number, batch, threaded=True)
                self._calling -= 1
        finally:
            self._runners -= 1

    async def _call(
        self, number: int, batch: Sequence[tuple[Trajectory, Row]], *, threaded: bool
    ) -> None:
        notes = TrainerLog(len(batch))
        arguments = self._arguments(batch, notes)
        function = self._functions[number]
        try:
            if threaded:
                loop = asyncio.get_running_loop()
                call = lambda: function.call(**arguments)  # noqa: E731
                scores = await loop.run_in_executor(self._threads, call)
            else:
                assert self._loop is not None
                running = asyncio.run_coroutine_threadsafe(function.call(**arguments), self._loop)
                scores = await asyncio.wrap_future(running)
            self._score(number, batch, list(scores), notes)
        except Exception as error:
            self.error = self.error or error
            self._take([])
            return
        self._finish(batch)

    def _arguments(
        self, batch: Sequence[tuple[Trajectory, Row]], notes: TrainerLog
    ) -> dict[str, Any]:
        rows = [row for _, row in batch]
        ids = [attempt.output.tokens.tolist() for attempt, _ in batch if attempt.output is not None]
        prompts = [row.prompt for row in rows]
        names = [name for name in rows[0].columns if name not in _NOT_COLUMNS]
        columns = {name: [row.columns[name] for row in rows] for name in names}
        return {
            "prompts": prompts,
            "completions": self._decode(ids, prompts),
            "completion_ids": ids,
            **columns,
            "trainer_state": self._state,
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
        }

    def _score(
        self,
        number: int,
        batch: Sequence[tuple[Trajectory, Row]],
        scores: list[Any],
        notes: TrainerLog,
    ) -> None:
        if len(scores) != len(batch):
            raise ValueError(
                f"the reward function '{self._functions[number].name}' returned {len(scores)} "
                f"rewards, but {len(batch)} were expected (one per prompt-completion pair)"
            )
        for place, (attempt, _) in enumerate(batch):
            if attempt.id not in self._open:
                continue
            logged, score = self._of[attempt.id], scores[place]
            logged.scores[number] = self._number(number, score)
            logged.extra |= {name: values[place] for name, values in notes.extra.items()}
            logged.metrics |= notes.metrics

    def _number(self, number: int, score: Any) -> float | None:
        try:
            return None if score is None else float(score)
        except (TypeError, ValueError):
            name = self._functions[number].name
            raise ValueError(
                f"the reward function '{name}' returned {score!r:.100}, which is not a number"
            ) from None

    def _finish(self, batch: Sequence[tuple[Trajectory, Row]]) -> None:
        grades: list[Grade] = []
        for attempt, _ in batch:
            if attempt.id not in self._open:
                continue
            logged = self._of[attempt.id]
            if len(logged.scores) == len(self._functions):
                self._open.discard(attempt.id)
                grades.append(self._grade(attempt.id, logged))
        if grades:
            self._take(grades)

    def _grade(self, attempt: AttemptId, logged: Logged) -> Grade:
        scores = {n: _known(logged.scores[n]) for n in range(len(self._functions))}
        weights = [function.weight for function in self._functions]
        known = [score * weights[n] for n, score in scores.items() if score is not None]
        return Grade(
            attempt=attempt,
            reward=sum(known) if known else None,
            rewards={self._functions[n].name: score for n, score in scores.items()},
            seconds=time.monotonic() - logged.since,
            extra={name: str(value) for name, value in logged.extra.items()},
            metrics=dict(logged.metrics),
        )

    def logged(self, attempt: AttemptId) -> Logged:
        return self._of[attempt]

    def recall(self, prompt: PromptId, grade: Grade) -> None:
        """Rounds here are never interrupted and continued."""
        raise AssertionError(f"prompt {prompt} has a grade of an earlier round: {grade}")

    def cancel(self, attempt: AttemptId) -> None:
        self._open.discard(attempt)
        self._waiting = [each for each in self._waiting if each[0].id != attempt]

    def pending(self) -> dict[AttemptId, float]:
        now = time.monotonic()
        return {attempt: now - self._of[attempt].since for attempt in self._open}

    def end_step(self) -> list[str]:
        return []

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class TrainerLog:
    """Holds one call's log: TRL's ``log_extra`` and ``log_metric``."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions table. Raises ``ValueError`` unless it has one value for
        each."""
        if len(values) != self._count:
            raise ValueError(
                f"log_extra('{column}'): {len(values)} values for {self._count} completions"
            )
        self.extra[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)


def _known(score: float | None) -> float | None:
    return None if score is None or math.isnan(score) else score
