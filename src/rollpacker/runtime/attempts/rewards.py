"""From finished attempts to grades: what an environment gave, timeouts, the reward processes."""

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
"""Of the reward in metrics and samples."""


class EnvironmentReward:
    """Adds it to the grades of the responses that have one.

    Args:
        config: of the environment; None where there is none.
        names: of the reward functions. Where there are none, an episode that was given nothing has
            a reward of 0.

    Raises ``ValueError`` where one has the environment's name.
    """

    def __init__(self, config: EnvironmentConfig | None, names: Sequence[str]) -> None:
        if config is not None and ENVIRONMENT in names:
            raise ValueError(
                f"rewards: one is named '{ENVIRONMENT}', as what the environment gives is: set "
                f"rewards.{names.index(ENVIRONMENT)}.name"
            )
        self._config = config
        self._alone = not names
        self._given: dict[AttemptId, float | None] = {}
        self._silent: int | None = 0
        """Episodes that ended by themselves and were given nothing; None once that is settled."""

    def note(self, attempts: Iterable[Trajectory]) -> list[Trajectory]:
        """Responses are about to be graded; those that reward functions are to see."""
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
        """What the user should know and was not told yet."""
        silent = self._silent
        if silent is None or silent < RESPONSES:
            return []
        self._silent = None
        return [
            f"WARNING environment: {silent} episodes ended and none was given a reward, which "
            "counts as 0, and there are no rewards beside: let the environment give one"
        ]

    def forget(self, attempt: AttemptId) -> None:
        """Its grade is not wanted."""
        self._given.pop(attempt, None)

    def add(self, grade: Grade) -> Grade:
        """A grade with the environment's reward in it."""
        given = self._given.pop(grade.attempt, None)
        if self._config is None or given is None or grade.error is not None:
            return grade
        scores: Mapping[str, float | None] = {**grade.rewards, ENVIRONMENT: given}
        total = (grade.reward or 0.0) + self._config.weight * given
        return replace(grade, reward=total, rewards=scores)

    def alone(self, attempts: Iterable[Trajectory]) -> list[Grade]:
        """Grades of responses that no reward function sees."""
        return [self.add(Grade(attempt=a.id, reward=None, rewards={})) for a in attempts]


class Rewards:
    """Grades attempts in processes that may die; results go to who listens.

    Args:
        rewards: the functions.
        config: how they are run.
        read: decodes responses, in the grading processes.
        rows: all that will be graded: which columns functions can ask for. Without any, a function
            that asks for another fails when it is called.
        deterministic: timeouts of programs change between steps only, and responses share no
            calls.
        max_steps: steps of the whole run, and
        epochs: its passes over the data, for functions that ask how far it is.
        environment: whose rewards are added; None where there is none.

    Raises ``ValueError`` when two rewards have one name, the environment's among them, or an option
    is wrong.
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
        # A judge's scores differ in the last bits with what shares their batch.
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
        """Wait for the processes; returns warnings.

        Raises ``ValueError`` when a function cannot be used.
        """
        self._pool.wait_ready()
        self._pool.attach(loop, self._take)
        self._loop = loop
        return _counted(self._pool.said())

    @contextlib.contextmanager
    def listen(self, take: Callable[[Sequence[Grade]], None]) -> Iterator[None]:
        """Give grades to this one while the context lasts."""
        before, self._listener = self._listener, take
        try:
            yield
        finally:
            self._listener = before

    def begin_step(self, step: int, epoch: float | None = None) -> None:
        """Functions that ask are told how far the run is from now on."""
        at = self._state.epoch if epoch is None else epoch
        self._state = replace(self._state, global_step=step, epoch=at)

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on: a function that only fails, or that no process can load."""
        return self._pool.broken

    def trouble(self) -> str | None:
        """Which functions only fail so far, in words."""
        return self._pool.trouble()

    @property
    def needs_group(self) -> bool:
        """Whether the responses of a prompt must be graded together."""
        return self._pool.needs_group

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        """Start grading; never waits. With ``needs_group``, one prompt's responses a call.

        What is not ``training`` is measured alike at all times: its programs get the longest
        timeout, and theirs change no timeout.
        """
        seen = self._environment.note(attempts)
        if len(seen) < len(attempts):
            known = {attempt.id for attempt in seen}
            self._give([attempt for attempt in attempts if attempt.id not in known])
        requests = [self._request(attempt, rows[attempt.prompt], training) for attempt in seen]
        if requests:
            self._pool.submit(requests, group=self._pool.needs_group)

    def _give(self, attempts: Sequence[Trajectory]) -> None:
        """Their rewards are known: they are told when the caller is done."""
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
        """Tests that a program for this row is run against; 0 where none is, or none can be read,
        which the grading process will say."""
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
        """Learn from a grade: one that has just come, or that of an earlier try or step."""
        for run in grade.runs.values():
            for test, seconds in enumerate(run.cpu_s):
                self._timeouts.observe(_case(prompt, test), seconds, run.verdict == "pass")

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; its result, if it comes, is dropped and its program is stopped."""
        self._observed.pop(attempt, None)
        self._environment.forget(attempt)
        self._ready = [each for each in self._ready if each.id != attempt]
        self._pool.cancel([attempt])

    def pending(self) -> dict[AttemptId, float]:
        """What is being waited for, and for how many seconds."""
        return self._pool.pending() | {attempt.id: 0.0 for attempt in self._ready}

    def end_step(self) -> list[str]:
        """A step is over; returns what failed in it and was mended."""
        self._timeouts.advance()
        self._pool.end_step()
        return [*_counted(self._pool.said()), *self._environment.said()]

    def state_dict(self) -> dict[str, Any]:
        """What is known of the tests' times, as JSON."""
        return self._timeouts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timeouts.load_state_dict(state)

    def close(self) -> None:
        self._pool.close()


class _Timeouts(Sequence[float]):
    """Those of a prompt's tests as they are when they are read: while a response waits for a
    process, others may show how long a correct one takes."""

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
    """Raise ``ValueError`` where rows and rewards do not fit: a domain without a reward, a reward
    for a domain that no row has, answers to compare with or programs to run on rows without."""
    domains = {row.domain: row for row in rows}
    for domain in domains if rewards else ():
        if not any(reward.applies(domain) for reward in rewards):
            raise ValueError(
                f"rewards: none is for the rows of domain '{domain}': "
                "add it to a reward's domains, or leave those empty"
            )
    for place, reward in enumerate(rewards):
        unknown = [domain for domain in reward.domains if domain not in domains]
        if unknown:
            raise ValueError(
                f"rewards.{place}.domains: no row is of domain '{unknown[0]}'; "
                f"the rows are of {', '.join(sorted(domains))} (data.domain_key)"
            )
        if reward.function == "math":
            _check_answers(place, [row for row in rows if reward.applies(row.domain)])
        if reward.runs_programs:
            _check_tests(place, reward, [row for row in rows if reward.applies(row.domain)])


def _check_answers(place: int, rows: Sequence[Row]) -> None:
    without = next((row for row in rows if is_blank(row.answer)), None)
    if without is not None:
        raise ValueError(
            f"rewards.{place}: 'math' compares with an answer, which row '{without.id}' has not: "
            "name its column in data.label_key, or choose the rows with rewards[].domains"
        )


def _check_tests(place: int, reward: RewardConfig, rows: Sequence[Row]) -> None:
    """Of the first row of each domain and layout: tests may be many megabytes."""
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
                f"rewards.{place}: 'code' cannot read the tests of row '{row.id}': {error}; "
                "rewards[].domains chooses its rows"
            ) from None


def _check_options(rewards: Sequence[RewardConfig]) -> None:
    if rewards and sys.platform != "linux":
        raise ValueError(f"rewards: 'code' needs Linux, this is {sys.platform}")
    for reward in rewards:
        from rollpacker.reward.code import read_options

        read_options(reward.options)


def _columns(rewards: Sequence[RewardConfig], rows: Collection[Row]) -> list[set[str]]:
    """For each reward, the columns of its rows; those that a row lacks are None there."""
    of: dict[str, set[str]] = {}
    for row in rows:
        of.setdefault(row.domain, set()).update(row.columns)
    return [set().union(*(of[d] for d in of if reward.applies(d))) for reward in rewards]


def _case(prompt: PromptId | None, test: int) -> str:
    return f"{prompt}#{test}"


def _counted(lines: Sequence[str]) -> list[str]:
    return [f"{line} ({n} times)" if n > 1 else line for line, n in Counter(lines).items()]
