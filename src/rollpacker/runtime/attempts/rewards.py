"""From finished attempts to grades: rewards of environments, timeouts, reward processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from rollpacker.config import EnvironmentConfig, GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.data.base import Row
from rollpacker.data.columns import is_blank
from rollpacker.policy.grading import RESPONSES, AdaptiveTimeouts
from rollpacker.response_text import ResponseText
from rollpacker.reward.base import Grade, GradeRequest, TrainerState
from rollpacker.reward.functions import reward_names
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.runtime.attempts.attempts import EpisodeRecord, Trajectory

ENVIRONMENT = "environment"


class EnvironmentReward:
    """Adds an environment's reward to grades. Without other rewards (``names``), a missing one is
    0. Raises ``ValueError`` if a function has the environment's name."""

    def __init__(self, config: EnvironmentConfig | None, names: Sequence[str]) -> None:
        if config is not None and ENVIRONMENT in names:
            raise ValueError(
                f"rewards: one has the name '{ENVIRONMENT}' of the environment's reward: set "
                f"rewards.{names.index(ENVIRONMENT)}.name"
            )
        self._config = config
        self._alone = not names
        self._given: dict[AttemptId, float | None] = {}
        self._silent: int | None = 0
        """Episodes that ended by themselves without a reward. None when an episode got one."""

    def note(self, attempts: Iterable[Trajectory]) -> list[Trajectory]:
        """Note responses before their grading, and return those for the reward functions."""
        if self._config is None:
            return list(attempts)
        seen: list[Trajectory] = []
        for attempt in attempts:
            conversation = attempt.conversation
            assert conversation is not None
            given = conversation.reward(self._config.reward)
            self._given[attempt.id] = 0.0 if given is None and self._alone else given
            self._count(given, conversation)
            if not (self._alone or conversation.failed):
                seen.append(attempt)
        return seen

    def _count(self, given: float | None, conversation: EpisodeRecord) -> None:
        if self._silent is None or conversation.failed:
            return
        if given is not None:
            self._silent = None
        elif self._alone and conversation.over == "stop":
            self._silent += 1

    def said(self) -> list[str]:
        silent = self._silent
        if silent is None or silent < RESPONSES:
            return []
        self._silent = None
        return [
            f"WARNING environment: {silent} episodes ended without a reward, which counts as 0, "
            "and there are no other rewards: let the environment give one"
        ]

    def forget(self, attempt: AttemptId) -> None:
        self._given.pop(attempt, None)

    def add(self, grade: Grade) -> Grade:
        given = self._given.pop(grade.attempt, None)
        if self._config is None or given is None or grade.error is not None:
            return grade
        scores: Mapping[str, float | None] = {**grade.rewards, ENVIRONMENT: given}
        total = (grade.reward or 0.0) + self._config.weight * given
        return replace(grade, reward=total, rewards=scores)

    def alone(self, attempts: Iterable[Trajectory]) -> list[Grade]:
        return [self.add(Grade(attempt=a.id, reward=None, rewards={})) for a in attempts]


class Rewards:
    """Grades attempts in processes that may die, and gives the grades to a listener.

    Args:
        rows: all rows to grade. Their columns are those that functions may ask for. Without rows, a
            function that asks for a missing column fails when it is called.
        deterministic: timeouts of programs change only between steps, and responses share no calls.
        max_steps, epochs: of the whole run, for functions that ask for its progress.

    Raises ``ValueError`` if two rewards have one name (the environment's included), or an option is
    wrong.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        config: GradingConfig,
        read: ResponseText | None,
        *,
        rows: Collection[Row] = (),
        deterministic: bool = False,
        max_steps: int = 0,
        epochs: int = 1,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self._state = TrainerState(max_steps=max_steps, num_train_epochs=epochs)
        self._code = [reward for reward in rewards if reward.runs_programs]
        _check_options(self._code)
        self._timeouts = AdaptiveTimeouts(config.code_timeout, at_once=not deterministic)
        self._longest = config.code_timeout.most_s
        self._tests: dict[PromptId, int] = {}
        self._observed: dict[AttemptId, PromptId] = {}
        self._environment = EnvironmentReward(environment, reward_names(rewards))
        # A judge's score depends in rounding on the other responses in its batch.
        columns = _columns(rewards, rows) if rows else None
        self._pool = GradingPool(
            rewards,
            config,
            join=not deterministic,
            columns=columns,
            read=read,
        )
        self._ready: list[Trajectory] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Callable[[Sequence[Grade]], None] = lambda _grades: None

    def start(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Wait for the processes and return warnings. Raises ``ValueError`` for a bad function."""
        self._pool.wait_ready()
        self._pool.attach(loop, self._take)
        self._loop = loop
        return _counted(self._pool.said())

    @contextlib.contextmanager
    def listen(self, take: Callable[[Sequence[Grade]], None]) -> Iterator[None]:
        before, self._listener = self._listener, take
        try:
            yield
        finally:
            self._listener = before

    def begin_step(self, step: int, epoch: float | None = None) -> None:
        at = self._state.epoch if epoch is None else epoch
        self._state = replace(self._state, global_step=step, epoch=at)

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on: a function always fails, or no process can load it."""
        return self._pool.broken

    def trouble(self) -> str | None:
        """A message on functions that have always failed so far."""
        return self._pool.trouble()

    @property
    def needs_group(self) -> bool:
        return self._pool.needs_group

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        """Start grading without waiting. With ``needs_group``, a call has all responses of one
        prompt. If it is not ``training``, programs get the longest timeout and change none, so that
        measurements are alike."""
        seen = self._environment.note(attempts)
        if len(seen) < len(attempts):
            known = {attempt.id for attempt in seen}
            self._give([attempt for attempt in attempts if attempt.id not in known])
        requests = [self._request(attempt, rows[attempt.prompt], training) for attempt in seen]
        if requests:
            self._pool.submit(requests, group=self._pool.needs_group)

    def _give(self, attempts: Sequence[Trajectory]) -> None:
        """Send known rewards to the listener after the caller has returned."""
        assert self._loop is not None
        if not self._ready:
            self._loop.call_soon(self._tell)
        self._ready += attempts

    def _tell(self) -> None:
        ready, self._ready = self._ready, []
        self._listener(self._environment.alone(ready))

    def _request(self, attempt: Trajectory, row: Row, training: bool) -> GradeRequest:
        assert attempt.output is not None
        tests = self._count_tests(row) if self._code else 0
        if tests and training:
            self._observed[attempt.id] = row.id
        return GradeRequest(
            attempt=attempt.id,
            prompt=row.prompt,
            completion_ids=np.ascontiguousarray(attempt.output.tokens, np.int32).data,
            row=row.columns,
            domain=row.domain,
            timeouts_s=(
                _Timeouts(self._timeouts, row.id, tests) if training else (self._longest,) * tests
            ),
            source=row.id,
            state=self._state,
            messages=() if attempt.conversation is None else attempt.conversation.messages,
        )

    def _count_tests(self, row: Row) -> int:
        """The number of tests for this row's programs. 0 if there are none, or if they cannot be
        read, which the grading process reports."""
        if row.id not in self._tests:
            self._tests[row.id] = 0
            if any(reward.applies(row.domain) for reward in self._code):
                from rollpacker.sandbox import read_tests

                with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                    self._tests[row.id] = len(read_tests(row.columns))
        return self._tests[row.id]

    def _take(self, grades: Sequence[Grade]) -> None:
        for grade in grades:
            prompt = self._observed.pop(grade.attempt, None)
            if prompt is not None:
                self.recall(prompt, grade)
        self._listener([self._environment.add(grade) for grade in grades])

    def recall(self, prompt: PromptId, grade: Grade) -> None:
        for run in grade.runs.values():
            for test, seconds in enumerate(run.cpu_s):
                self._timeouts.observe(_case(prompt, test), seconds, run.verdict == "pass")

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt: stop its program and drop its result."""
        self._observed.pop(attempt, None)
        self._environment.forget(attempt)
        self._ready = [each for each in self._ready if each.id != attempt]
        self._pool.cancel([attempt])

    def pending(self) -> dict[AttemptId, float]:
        """Awaited attempts, with the seconds that each has waited."""
        return self._pool.pending() | {attempt.id: 0.0 for attempt in self._ready}

    def end_step(self) -> list[str]:
        """End a step, and return log lines on mended failures."""
        self._timeouts.advance()
        self._pool.end_step()
        return [*_counted(self._pool.said()), *self._environment.said()]

    def state_dict(self) -> dict[str, Any]:
        return self._timeouts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timeouts.load_state_dict(state)

    def close(self) -> None:
        self._pool.close()


class _Timeouts(Sequence[float]):
    """Timeouts of a prompt's tests when they are read. While a response waits for a process, others
    may show the time of a correct program."""

    def __init__(self, timeouts: AdaptiveTimeouts, prompt: PromptId, tests: int) -> None:
        self._timeouts = timeouts
        self._prompt = prompt
        self._tests = range(tests)

    def __len__(self) -> int:
        return len(self._tests)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[float, ...]: ...
    def __getitem__(self, index: int | slice) -> float | tuple[float, ...]:
        if isinstance(index, slice):
            return tuple(self[test] for test in self._tests[index])
        return self._timeouts.timeout(_case(self._prompt, self._tests[index]))


def check_rows(rewards: Sequence[RewardConfig], rows: Collection[Row]) -> None:
    """Raise ``ValueError`` for a domain without a reward or row, and for rows without the answers
    or tests that a reward needs."""
    domains = {row.domain: row for row in rows}
    for domain in domains if rewards else ():
        if not any(reward.applies(domain) for reward in rewards):
            raise ValueError(
                f"rewards: no reward applies to the rows of domain '{domain}': "
                "add it to a reward's domains, or leave those empty"
            )
    for place, reward in enumerate(rewards):
        unknown = [domain for domain in reward.domains if domain not in domains]
        if unknown:
            raise ValueError(
                f"rewards.{place}.domains: no row has domain '{unknown[0]}', only "
                f"{', '.join(sorted(domains))} (data.domain_key)"
            )
        if reward.function == "math":
            _check_answers(place, [row for row in rows if reward.applies(row.domain)])
        if reward.runs_programs:
            _check_tests(place, reward, [row for row in rows if reward.applies(row.domain)])


def _check_answers(place: int, rows: Sequence[Row]) -> None:
    without = next((row for row in rows if is_blank(row.answer)), None)
    if without is not None:
        raise ValueError(
            f"rewards.{place}: 'math' needs an answer, which row '{without.id}' lacks: "
            "set data.label_key to its column, or choose the rows with rewards[].domains"
        )


def _check_tests(place: int, reward: RewardConfig, rows: Sequence[Row]) -> None:
    """Check the first row of each domain and layout, as tests may be many megabytes."""
    from rollpacker.reward.code import read_options, row_tests

    remote = read_options(reward.options).remote is not None
    seen: set[tuple[str, frozenset[str]]] = set()
    for row in rows:
        layout = (
            row.domain,
            frozenset(name for name, value in row.columns.items() if value is not None),
        )
        if layout in seen:
            continue
        seen.add(layout)
        try:
            row_tests(row.columns, remote)
        except ValueError as error:
            raise ValueError(
                f"rewards.{place}: 'code' cannot read the tests of row '{row.id}': {error}. "
                "Choose its rows with rewards[].domains."
            ) from None


def _check_options(rewards: Sequence[RewardConfig]) -> None:
    if rewards and sys.platform != "linux":
        raise ValueError(f"rewards: 'code' needs Linux, this is {sys.platform}")
    for reward in rewards:
        from rollpacker.reward.code import read_options

        read_options(reward.options)


def _columns(rewards: Sequence[RewardConfig], rows: Collection[Row]) -> list[set[str]]:
    of: dict[str, set[str]] = {}
    for row in rows:
        of.setdefault(row.domain, set()).update(row.columns)
    return [set().union(*(of[d] for d in of if reward.applies(d))) for reward in rewards]


def _case(prompt: PromptId | None, test: int) -> str:
    return f"{prompt}#{test}"


def _counted(lines: Sequence[str]) -> list[str]:
    return [f"{line} ({n} times)" if n > 1 else line for line, n in Counter(lines).items()]
