"""The input of a reward function and the output of the graders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.types import AttemptId
from rollpacker.errors import PlainError


class GradingError(PlainError):
    """A response could not be graded. No score is invented for it."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The progress of the run, under the names of transformers' ``TrainerState``. ``global_step``
    is 0 during the first step. ``epoch`` counts passes over the data, with a fraction."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 1

    @property
    def is_world_process_zero(self) -> bool:
        """Always true: each response is graded once."""
        return True

    is_local_process_zero = is_world_process_zero


START = TrainerState()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """One response to grade.

    Args:
        prompt: text or chat messages, as the user gave them.
        completion: the decoded response without its end token, or a function that decodes it on
            demand (``text``).
        row: the columns of the data row (``answer`` and any others).
        domain: the row's task domain, which selects the rewards.
        timeouts_s: CPU seconds for each test of the row, for rewards that run programs. They are
            read when the request is sent to a process.
        source: id of the data row.
        messages: the conversation after the prompt, if an environment took part in it.
    """

    attempt: AttemptId
    prompt: str | list[dict[str, str]]
    completion: str | Callable[[], str] = ""
    completion_ids: Sequence[int]
    row: Mapping[str, Any]
    domain: str = "default"
    timeouts_s: Sequence[float] = ()
    source: str = ""
    state: TrainerState = START
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def text(self) -> str:
        return self.completion if isinstance(self.completion, str) else self.completion()


NO_CODE = "no_code"  # the verdict on a response without a program


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRun:
    """The outcome of a response's program.

    Args:
        verdict: ``pass``, ``fail``, ``crash``, ``tle_cpu``, ``tle_idle``, or ``no_code`` without a
            program.
        tests: verdict of each test that was run, in order.
        cpu_s: CPU seconds of each of them.
        timeout_s: mean CPU seconds allowed.
        forgeable: a test was run where the program could change its outcome.
    """

    verdict: str
    tests: tuple[str, ...]
    cpu_s: tuple[float, ...]
    timeout_s: float
    level: str
    forgeable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A score and its details. ``score``: None if the function is not applicable. ``extra``:
    columns for the samples table. ``metrics``: numbers whose means are the step's metrics."""

    score: float | None
    run: CodeRun | None = None
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome for one response.

    Args:
        reward: weighted sum. None if grading failed (see ``error``) or if no function is
            applicable.
        rewards: each function's score by name. None: not applicable. Functions that did not finish
            are missing.
        seconds: time of the functions. An equal share if a call graded several responses.
        runs: the outcome of the program, by the name of the reward that ran it.
        extra: columns that the functions logged for the samples table.
        metrics: numbers that the functions logged.
    """

    attempt: AttemptId
    reward: float | None
    rewards: Mapping[str, float | None]
    error: str | None = None
    seconds: float = 0.0
    runs: Mapping[str, CodeRun] = field(default_factory=dict[str, CodeRun])
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


# The text of a response after its thinking: the part that built-in rewards read.

CLOSE = "</think>"
_NAME = (
    r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|rationale|scratchpad|analysis|cot)"
)
_OPENS = re.compile(
    rf"<[|｜]?{_NAME}[|｜]?>|\[THINK\]|◁think▷|<\|(?:begin_of_thought|start_thinking|inner_prefix)\|>"
    r"|<\|channel\|>(?!final\b)[^<>]{0,40}<\|message\|>",
    re.IGNORECASE,
)
_CLOSES = re.compile(
    rf"(?:</|<[|｜]/){_NAME}[|｜]?>|\[/THINK\]|◁/think▷|<\|(?:end_of_thought|end_thinking|inner_suffix)\|>"
    r"|<\|channel\|>final\b[^<>]{0,40}<\|message\|>",
    re.IGNORECASE,
)
"""Marks around thinking: the tags of DeepSeek, Qwen and Seed, the tokens of Magistral, Kimi,
Sky-T1, Command and Apertus, and the channels of gpt-oss."""


def after_thinking(text: str) -> str:
    """Return the text after the last mark that closes the thinking.

    Without such a mark, a response that was cut off in its thinking counts up to the opening mark,
    or from an ``<answer>`` behind it. A model whose template opens the thinking writes no
    ``<think>``: then all of the text counts.
    """
    text = text.rpartition(CLOSE)[2]  # the most common mark, found without a regular expression
    after = text[max((mark.end() for mark in _CLOSES.finditer(text)), default=0) :]
    opened = _OPENS.search(after)
    if opened is None:
        return after
    answer = after.rfind("<answer>", opened.end())
    return after[answer:] if answer >= 0 else after[: opened.start()]
