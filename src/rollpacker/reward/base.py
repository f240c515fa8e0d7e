"""What a reward function is given and what the graders return."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.types import AttemptId
from rollpacker.errors import PlainError


class GradingError(PlainError):
    """A response could not be graded; no score is invented for it."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far the run is, under the names of transformers' ``TrainerState``.

    Args:
        global_step: steps done; 0 during the first one.
        max_steps: steps of the whole run.
        epoch: passes over the data so far, with its fraction.
        num_train_epochs: passes of the whole run.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 1

    @property
    def is_world_process_zero(self) -> bool:
        """True: a response is graded once, whoever asks."""
        return True

    is_local_process_zero = is_world_process_zero


START = TrainerState()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """One response to grade.

    Args:
        attempt: what is graded.
        prompt: the prompt as the user gave it: text or chat messages.
        completion: the decoded response without what ends it, or what decodes it when it is
            first asked for (``text``); a pool with a tokenizer has its processes fill it in.
        completion_ids: its token ids; a list where rewards see it.
        row: the columns of the data row (``answer`` and any others).
        domain: the row's task domain: which rewards apply.
        timeouts_s: CPU seconds for each test of the row, read when the request is sent to a
            process; for rewards that run programs.
        source: id of the data row.
        state: how far the run is.
        messages: the conversation behind the prompt, where an environment took part in it.
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
        """The decoded response."""
        return self.completion if isinstance(self.completion, str) else self.completion()


NO_CODE = "no_code"
"""Verdict on a response without a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRun:
    """What became of a response's program.

    Args:
        verdict: ``pass``, ``fail``, ``crash``, ``tle_cpu`` or ``tle_idle``; ``no_code`` where the
            response has no program.
        tests: verdict of each test that was run, in order.
        cpu_s: CPU seconds of each of them.
        timeout_s: mean CPU seconds that they were given.
        level: the isolation that the program ran in.
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
    """A score with what there is to say of how it came about.

    Args:
        score: None where the function is not applicable.
        run: what became of the response's program.
        extra: columns for the samples table.
        metrics: numbers whose means are the step's metrics, by their full names.
    """

    score: float | None
    run: CodeRun | None = None
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome for one response.

    Args:
        attempt: what was graded.
        reward: weighted sum. None when grading failed, and ``error`` says why; or, without an
            error, when no function is applicable.
        rewards: every function's score by name; None where it is not applicable, and nothing
            where it was not called to the end.
        error: why there is no reward.
        seconds: time that the functions took; of a call for several responses, an equal share.
        runs: what became of the response's program, by the name of the reward that ran it.
        extra: columns that the functions logged for the samples table.
        metrics: numbers that the functions logged, by metric.
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
"""The marks that open models write around what they think: DeepSeek's, Qwen's and Seed's tags,
Magistral's, Kimi's, Sky-T1's, Command's and Apertus's tokens, and the channels of gpt-oss."""


def after_thinking(text: str) -> str:
    """The text after the last mark that closes the thinking; without one, what stands before a mark
    that opens it and was never closed, as in a response that was cut off, but for an ``<answer>``
    behind that.

    A model whose template opens the thinking writes no ``<think>``: all of it counts then.
    """
    text = text.rpartition(CLOSE)[2]  # most thinking ends so, and is not looked through
    after = text[max((mark.end() for mark in _CLOSES.finditer(text)), default=0) :]
    opened = _OPENS.search(after)
    if opened is None:
        return after
    answer = after.rfind("<answer>", opened.end())
    return after[answer:] if answer >= 0 else after[: opened.start()]
