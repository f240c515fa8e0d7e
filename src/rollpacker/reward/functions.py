"""Reward functions: found by path, recognised by signature, their scores checked.

TRL's ``f(prompts, completions, completion_ids, **columns) -> list[float | None]`` (plain or
async) and verl's ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float``
(or a dict with ``score``). User code is imported by the grading processes only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.reward.base import GradeRequest, GradingError, Scored

if TYPE_CHECKING:
    import asyncio

    from rollpacker.config import RewardConfig
    from rollpacker.reward.code import Host

Scorer = Callable[[Sequence[GradeRequest]], Sequence[float | Scored | None]]
"""Scores of some responses, one each; None where the function is not applicable."""

BUILT_IN = ("math", "code", "rg")

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_COLUMNS = {"prompt", "prompts", "completion", "completions", "completion_ids"}


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """The rewards' names in the metrics. Raises ``ValueError`` when two are equal."""
    names = [reward.name or reward.function.rpartition(":")[2] for reward in rewards]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"rewards: two are named '{name}': set rewards.{place}.name")
    return names


def resolve(function: str, options: Mapping[str, Any], host: Host | None = None) -> Scorer:
    """The scorer of ``RewardConfig.function``; its options are bound.

    Args:
        function: as in the configuration.
        options: its keyword arguments.
        host: the process that it will run in, if that is a grading process.

    Raises ``ValueError`` when there is no such function, or it has an unknown signature or no
    such option.
    """
    if function in BUILT_IN:
        return _built_in(function, options, host)
    target = _find(function)
    names, any_name = _parameters(function, target)
    _check_options(function, options, names, any_name)
    if "solution_str" in names:
        return _verl_scorer(function, target, options, None if any_name else names)
    if names & {"completions", "prompts", "completion_ids"}:
        return _trl_scorer(function, target, options, None if any_name else names)
    raise ValueError(
        f"rewards: '{function}' has neither TRL's signature (prompts, completions, "
        "completion_ids, **columns) nor verl's (data_source, solution_str, ground_truth, "
        f"extra_info); it takes {sorted(names)}"
    )


def _built_in(function: str, options: Mapping[str, Any], host: Host | None) -> Scorer:
    # Here, so that each grading process imports only the libraries of its own rewards.
    if function == "code":
        from rollpacker.reward.code import CodeReward

        code = CodeReward(options, host)
        return lambda requests: [code(request) for request in requests]
    if function == "math":
        from rollpacker.reward.math import MathReward as Reward
    else:
        from rollpacker.reward.task import TaskReward as Reward
    names = set(inspect.signature(Reward).parameters)
    _check_options(function, options, names, any_name=False)
    score = Reward(**options)
    return lambda requests: [
        _number(function, score(request.completion, request.row)) for request in requests
    ]


def _find(function: str) -> Callable[..., Any]:
    place, colon, name = function.rpartition(":")
    if not colon:
        raise ValueError(
            f"rewards: unknown function '{function}': expected {', '.join(BUILT_IN)}, "
            "path/to/file.py:name or package.module:name"
        )
    try:
        is_file = place.endswith(".py")
        module = _load_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as error:  # importing runs the user's code
        raise ValueError(f"rewards: cannot import '{place}': {one_line(error)}") from error
    target = getattr(module, name, None)
    if not callable(target):
        raise ValueError(f"rewards: '{place}' has no function '{name}'")
    return target


def _load_file(file: Path) -> Any:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file '{file}'")
    # Its neighbours can be imported, but never shadow a library.
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _parameters(function: str, target: Callable[..., Any]) -> tuple[set[str], bool]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"rewards: '{function}' has no readable signature") from None
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in by_name}, any_name


def _check_options(
    function: str, options: Mapping[str, Any], names: set[str], any_name: bool
) -> None:
    unknown = [] if any_name else sorted(set(options) - names)
    if unknown:
        raise ValueError(
            f"rewards: '{function}' takes no option '{unknown[0]}'; it takes {sorted(names)}"
        )


def one_line(error: BaseException) -> str:
    """An exception as one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _number(function: str, value: Any) -> float | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float):
        raise GradingError(f"reward '{function}' returned {_brief(value)}, expected a number")
    number = float(number)
    if not math.isfinite(number):
        raise GradingError(f"reward '{function}' returned {number}, expected a finite number")
    return number


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:120]


def _verl_scorer(
    function: str, target: Callable[..., Any], options: Mapping[str, Any], names: set[str] | None
) -> Scorer:
    known = [n for n in _VERL if (names is None or n in names) and n not in options]

    def one(request: GradeRequest) -> float | None:
        row = request.row
        values = {
            "data_source": row.get("data_source", "default"),
            "solution_str": request.completion,
            "ground_truth": row.get("answer"),
            "extra_info": row.get("extra_info") or {},
        }
        result = target(**{n: values[n] for n in known}, **options)
        if inspect.isawaitable(result):
            result = _run(result)
        if isinstance(result, Mapping):
            if "score" not in result:
                raise GradingError(f"reward '{function}' returned a dict without 'score'")
            result = result["score"]
        return _number(function, result)

    return lambda requests: [one(request) for request in requests]


def _trl_scorer(
    function: str, target: Callable[..., Any], options: Mapping[str, Any], names: set[str] | None
) -> Scorer:
    def score(requests: Sequence[GradeRequest]) -> list[float | None]:
        values = _columns(requests)
        values["prompts"] = [r.prompt for r in requests]
        values["completions"] = [_completion(r) for r in requests]
        values["completion_ids"] = [r.completion_ids for r in requests]
        chosen = {
            n: v for n, v in values.items() if (names is None or n in names) and n not in options
        }
        result = target(**chosen, **options)
        if inspect.isawaitable(result):
            result = _run(result)
        if hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, list | tuple) or len(result) != len(requests):
            raise GradingError(
                f"reward '{function}' returned {_brief(result)}, expected a list of "
                f"{len(requests)} numbers"
            )
        return [_number(function, value) for value in result]

    return score


def _columns(requests: Sequence[GradeRequest]) -> dict[str, list[Any]]:
    names = [name for name in requests[0].row if name not in _NOT_COLUMNS]
    return {name: [request.row.get(name) for request in requests] for name in names}


def _completion(request: GradeRequest) -> str | list[dict[str, str]]:
    if isinstance(request.prompt, str):
        return request.completion
    return [{"role": "assistant", "content": request.completion}]


_loop: asyncio.AbstractEventLoop | None = None


def _run(result: Awaitable[Any]) -> Any:
    import asyncio

    # One loop per process, so that a function may keep its connections between calls.
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    return _loop.run_until_complete(result)
