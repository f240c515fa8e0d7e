"""Reward functions: recognised by signature, called, their scores checked.

TRL's signature is ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``,
plain or async. verl's is ``compute_score(data_source, solution_str, ground_truth, extra_info)``,
which returns a number or a dict with ``score``, and has a batch form with plural names. Only
grading processes import user code.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.errors import defined, told
from rollpacker.reward.base import GradeRequest, GradingError, Scored, after_thinking
from rollpacker.user_code import BUILT_IN, Parameters, find

if TYPE_CHECKING:
    import asyncio

    from rollpacker.config import RewardConfig
    from rollpacker.reward.code import GraderHost


# Values that a reward function logs beside its scores: TRL's ``log_extra`` and ``log_metric``,
# and the other keys of verl's result.

_LONGEST = 10_000
"""Characters of one value. This keeps replies small."""


class LoggedValues:
    """Collects the values that one call logs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[str]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's: a column of the samples table, one value for each response of the call."""
        self._columns.setdefault(str(column), []).extend(str(v)[:_LONGEST] for v in values)

    def log_metric(self, name: str, value: float) -> None:
        """TRL's: a metric of the step, the mean over all calls. NaN is ignored, as in TRL. Raises
        ``TypeError`` if the value is not a number."""
        number = plain(value)
        if not isinstance(number, bool | int | float):
            raise TypeError(f"log_metric('{name}') takes a number, not {brief(value)}")
        if math.isfinite(number):
            self._metrics.setdefault(str(name), []).append(float(number))

    def attach(self, scores: Sequence[float | None]) -> list[float | Scored | None]:
        """Return the scores with the logged values, or the plain scores if nothing was logged.
        Raises ``GradingError`` if a column does not have one value for each response."""
        for column, values in self._columns.items():
            if len(values) != self._count:
                raise GradingError(
                    f"log_extra('{column}') got {len(values)} values for {self._count} responses"
                )
        if not self._columns and not self._metrics:
            return list(scores)
        metrics = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        return [
            Scored(
                score=score,
                extra={column: values[place] for column, values in self._columns.items()},
                metrics=metrics,
            )
            for place, score in enumerate(scores)
        ]


def verl_extras(result: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the columns and metrics from the keys beside ``score``: numbers are metrics."""
    extra: dict[str, str] = {}
    metrics: dict[str, float] = {}
    for key, value in result.items():
        number = plain(value)
        if key == "score" or value is None:
            continue
        if not isinstance(number, bool | int | float):
            extra[str(key)] = str(value)[:_LONGEST]
        elif math.isfinite(number):
            metrics[f"reward_extra/{key}/mean"] = float(number)
    return extra, metrics


def plain(value: Any) -> Any:
    """A NumPy or torch scalar as Python's. Other values stay."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # more than one element
        return value


def brief(value: Any) -> str:
    """The type of a value and its beginning, for an error."""
    return f"{type(value).__name__} {value!r}"[:120]


# Majority votes: texts that count as the same answer.


def voting(rewards: Sequence[RewardConfig]) -> tuple[str, Callable[[str], str]]:
    """Return how majority votes compare responses: in words, and as a key function of the text. The
    first reward ``math`` or ``rg`` decides. Without one, only equal texts are equal answers."""
    for reward in rewards:
        if reward.function == "math":
            return "the final answer, as it is read", _math_votes
        if reward.function == "rg":
            return "the text after </think>", _after_thinking
    return "the whole text", str.strip


def _after_thinking(text: str) -> str:
    return after_thinking(text).strip()


def _math_votes(text: str) -> str:
    # Imported here, so that votes on other rewards don't need math-verify.
    from rollpacker.reward.math.answer import read
    from rollpacker.reward.math.extract import extract

    found = extract(text)
    if found is None:
        return _after_thinking(text)
    answer = read(found.answer)
    return answer.choice or (str(answer.value) if answer.value is not None else answer.text)


Scorer = Callable[[Sequence[GradeRequest]], Sequence[float | Scored | None]]
"""Returns one score for each request, or None if the function is not applicable."""

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TRL = ("prompts", "completions", "completion_ids")
_TRL_ALSO = ("trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS = {"prompt", "completion", *_TRL, *_TRL_ALSO}
_TURNS = 2  # verl's count for one question and one answer


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the rewards' names in the metrics. Raises ``ValueError`` if two are equal."""
    names = [
        reward.name or Path(reward.function.rpartition(":")[2]).name or reward.function
        for reward in rewards
    ]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"rewards: two are named '{name}': set rewards.{place}.name")
    return names


def resolve(
    function: str,
    options: Mapping[str, Any],
    host: GraderHost | None = None,
    columns: Collection[str] | None = None,
) -> Scorer:
    """Return the scorer of ``RewardConfig.function``, its options bound.

    ``host``: the grading process that runs it, if any. ``columns``: of its rows, if known. Raises
    ``ValueError`` if the function or an option does not exist, its signature is unknown, or an
    argument has no source.
    """
    if function in BUILT_IN:
        return _built_in(function, options, host)
    if ":" not in function and Path(function).expanduser().is_dir():
        from rollpacker.reward.classifier import from_checkpoint

        return from_checkpoint(function, options)
    target: Any = find(function)
    if inspect.isclass(target):
        target, options = _instance(function, target, options), {}
    if _is_module(target):
        parameters = Parameters(function, target.forward)
        if "input_ids" in parameters.names:
            from rollpacker.reward.classifier import from_module

            return from_module(function, target, options)
    else:
        parameters = Parameters(function, target)
    return _called(function, target, parameters, options, columns)


def _called(
    function: str,
    target: Callable[..., Any],
    parameters: Parameters,
    options: Mapping[str, Any],
    columns: Collection[str] | None,
) -> Scorer:
    parameters.check_options(options)
    known = None if columns is None else sorted({*columns} - _NOT_COLUMNS)
    for names, build in ((_VERL, _verl), (_VERL_BATCH, _verl_batch)):
        if names[1] in parameters.names:
            parameters.check_given((*names, *options))
            taken = [n for n in names if parameters.take(n) and n not in options]
            return _located(target, build(target, options, taken))
    if parameters.names & {*_TRL} or (parameters.any and not parameters.names - {*options}):
        if known is not None:
            parameters.check_given((*_TRL, *_TRL_ALSO, *options), known)
        return _located(target, _trl(target, options, parameters, known))
    raise ValueError(
        f"rewards: '{function}' has neither TRL's signature (prompts, completions, "
        "completion_ids, **columns) nor verl's (data_source, solution_str, ground_truth, "
        f"extra_info). It takes {sorted(parameters.names)}"
    )


def _located(target: Any, scorer: Scorer) -> Scorer:
    place = defined(target)

    def score(requests: Sequence[GradeRequest]) -> Sequence[float | Scored | None]:
        try:
            return scorer(requests)
        except GradingError as error:
            raise GradingError(f"{place}: {error}") from error

    return scorer if place is None else score


def _is_module(target: Any) -> bool:
    # A module exists only if torch was imported.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def _instance(function: str, made: type, options: Mapping[str, Any]) -> Callable[..., Any]:
    parameters = Parameters(function, made)
    parameters.check_options(options)
    parameters.check_given(options)
    try:
        target = made(**options)
    except (Exception, SystemExit) as error:
        raise ValueError(f"rewards: '{function}' cannot be made: {told(error)}") from error
    if not callable(target):
        raise ValueError(f"rewards: '{function}' is a class without __call__")
    return target


def _built_in(function: str, options: Mapping[str, Any], host: GraderHost | None) -> Scorer:
    # Imported here, so that a grading process loads only the libraries of its own rewards.
    if function == "code":
        from rollpacker.reward.code import CodeReward

        code = CodeReward(options, host)
        return lambda requests: [code(request) for request in requests]
    if function == "judge":
        return _judge(options)
    if function == "math":
        return _math(options, host)
    from rollpacker.reward.task import TaskReward

    Parameters(function, TaskReward).check_options(options)
    score = TaskReward(**options)
    return lambda requests: [_number(score(request.text, request.row)) for request in requests]


def _math(options: Mapping[str, Any], host: GraderHost | None) -> Scorer:
    from rollpacker.reward.math import MathReward

    Parameters("math", MathReward).check_options(options)
    score = MathReward(**options)
    waited = () if host is None else (host.unwanted,)
    return lambda requests: [score(request.text, request.row, *waited) for request in requests]


def _judge(options: Mapping[str, Any]) -> Scorer:
    from rollpacker.config.reading import parse_as
    from rollpacker.reward.judge.judge import Judge
    from rollpacker.reward.judge.options import JudgeOptions

    judge = Judge(parse_as(JudgeOptions, dict(options), source="rewards: judge"))
    return lambda requests: [*judge.grade(requests)]


# -- results


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = plain(value)
    if not isinstance(number, bool | int | float):
        raise GradingError(f"returned {brief(value)}, expected a number")
    number = float(number)
    if not math.isfinite(number):
        raise GradingError(f"returned {number}, expected a finite number")
    return number


def _nan_is_none(value: Any) -> Any:
    number = plain(value)
    return None if isinstance(number, float) and math.isnan(number) else number


def _list(result: Any, count: int, what: str) -> list[Any]:
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping):
        result = list(result)
        if len(result) == count:
            return result
    raise GradingError(f"returned {brief(result)}, expected a list of {count} {what}")


# -- verl


def _verl_values(request: GradeRequest) -> tuple[Any, str, Any, dict[str, Any]]:
    row = request.row
    info = row.get("extra_info")
    extra_info = {**info} if isinstance(info, Mapping) else {}
    turns = max(_TURNS, 1 + len(request.messages))
    extra_info |= {"num_turns": turns, "rollout_reward_scores": {}}
    return row.get("data_source", "default"), request.text, row.get("answer"), extra_info


def _verl_score(result: Any) -> float | Scored | None:
    if not isinstance(result, Mapping):
        return _number(result)
    if "score" not in result:
        raise GradingError(f"returned a dict without 'score': it has {sorted(map(str, result))}")
    score = _number(result["score"])
    extra, metrics = verl_extras(result)
    return Scored(score=score, extra=extra, metrics=metrics) if extra or metrics else score


def _verl(target: Callable[..., Any], options: Mapping[str, Any], taken: list[str]) -> Scorer:
    def one(request: GradeRequest) -> float | Scored | None:
        values: dict[str, Any] = dict(zip(_VERL, _verl_values(request), strict=True))
        return _verl_score(_finished(target(**{n: values[n] for n in taken}, **options)))

    return lambda requests: [one(request) for request in requests]


def _verl_batch(target: Callable[..., Any], options: Mapping[str, Any], taken: list[str]) -> Scorer:
    def score(requests: Sequence[GradeRequest]) -> list[float | Scored | None]:
        lists = map(list, zip(*map(_verl_values, requests), strict=True))
        values: dict[str, Any] = dict(zip(_VERL_BATCH, lists, strict=True))
        result = _finished(target(**{n: values[n] for n in taken}, **options))
        return [_verl_score(each) for each in _list(result, len(requests), "numbers or dicts")]

    return score


# -- TRL


def _trl(
    target: Callable[..., Any],
    options: Mapping[str, Any],
    parameters: Parameters,
    columns: Sequence[str] | None,
) -> Scorer:
    def score(requests: Sequence[GradeRequest]) -> list[float | Scored | None]:
        notes = LoggedValues(len(requests))
        names = (
            [n for n in requests[0].row if n not in _NOT_COLUMNS] if columns is None else columns
        )
        values: dict[str, Any] = {n: [r.row.get(n) for r in requests] for n in names}
        values["prompts"] = [r.prompt for r in requests]
        if parameters.take("completions"):  # decode only for functions that read texts
            values["completions"] = [_completion(r) for r in requests]
        values["completion_ids"] = [r.completion_ids for r in requests]
        values["trainer_state"] = requests[0].state
        values["log_extra"] = notes.log_extra
        values["log_metric"] = notes.log_metric
        chosen = {n: v for n, v in values.items() if parameters.take(n) and n not in options}
        result = _finished(target(**chosen, **options))
        found = _list(result, len(requests), "numbers")
        return notes.attach([_number(_nan_is_none(value)) for value in found])

    return score


def _completion(request: GradeRequest) -> str | list[Any]:
    if request.messages:
        return list(request.messages)
    if isinstance(request.prompt, str):
        return request.text
    return [{"role": "assistant", "content": request.text}]


_loop: asyncio.AbstractEventLoop | None = None


def _finished(result: Any) -> Any:
    if not inspect.isawaitable(result):
        return result
    import asyncio

    # One loop per process, so that a function may keep its connections between calls.
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    return _loop.run_until_complete(result)
