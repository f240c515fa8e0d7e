"""``rollpacker rewards check``: explains the score of a response."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rollpacker.cli.output import Overrides, Shown, shown
from rollpacker.errors import PlainError, told

if TYPE_CHECKING:
    from rollpacker.config import DataConfig, RewardConfig
    from rollpacker.data.base import Row
    from rollpacker.reward.base import GradeRequest
    from rollpacker.reward.math.reward import MathReport

rewards_app = typer.Typer(help="Try rewards.", no_args_is_help=True, pretty_exceptions_enable=False)

_YAML = (".yaml", ".yml")
_SHOWN = 300
_Graded: TypeAlias = tuple[float | None, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of one reward: its score (None if it does not apply), weight and explanation."""

    reward: str
    weight: float
    score: float | None
    said: Mapping[str, Any]


@rewards_app.callback()
def _group() -> None:
    """Try rewards."""


@rewards_app.command()
@shown
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A job's YAML, or a file of data rows."),
    ] = None,
    overrides: Overrides = None,
    response: Annotated[str | None, typer.Option(help="Response text (- reads stdin).")] = None,
    response_file: Annotated[Path | None, typer.Option(help="File with the response.")] = None,
    answer: Annotated[str | None, typer.Option(help="Right answer instead of the row's.")] = None,
    row: Annotated[str | None, typer.Option(help="Row by id (default: the file's first).")] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="math or code (default: the job's rewards, else by the row's columns)."),
    ] = None,
) -> Shown:
    """Grade one response and print the extracted answer, how it was read, and the comparison.

    Example: rollpacker rewards check --answer '72 dollars' --response 'It is \\boxed{72 clips}'
    """
    text = _response(response, response_file)
    found, rewards = _row_and_rewards(file, overrides or [], row, answer, reward)
    found = _with_answer(found, answer, rewards)
    checked = [_check(each, text, found) for each in rewards]
    scores = [each.weight * each.score for each in checked if each.score is not None]
    total = sum(scores) if scores else None
    rows = [{"reward": c.reward, "weight": c.weight, "score": c.score, **c.said} for c in checked]
    several = len(checked) > 1
    lines = [line for each in checked for line in _lines(each, weighted=several)]
    lines += [("total", _shown(total))] if several else []
    data = {"row": found.id if file else None, "rewards": rows, "total": total}
    texts = [f"{name.replace('_', ' '):<17}{value}" for name, value in lines]
    return Shown(data, texts if file is None else [f"row {found.id}", *texts])


def _response(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise ValueError("give the response: --response TEXT, or --response-file FILE")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--response-file: {file} is not UTF-8: {error.reason}") from None
    return sys.stdin.read() if text == "-" else str(text)


def _row_and_rewards(
    file: Path | None,
    overrides: Sequence[str],
    wanted: str | None,
    answer: str | None,
    function: str | None,
) -> tuple[Row, Sequence[RewardConfig]]:
    from rollpacker.config import RewardConfig, load
    from rollpacker.core.types import PromptId
    from rollpacker.data.base import Row

    if file is None:
        if answer is None or wanted is not None:
            raise ValueError("give --answer, or a FILE with the row")
        columns = {"answer": answer}
        row = Row(id=PromptId("-"), prompt="", answer=answer, domain="default", columns=columns)
        return row, [RewardConfig(function=function or "math")]
    if file.suffix in _YAML:
        job = load(file, overrides)
        row = _row(job.data, wanted)
        rewards = [each for each in job.rewards if not each.domains or row.domain in each.domains]
        if function is not None:
            rewards = [each for each in rewards if each.function == function]
        if not rewards:
            of = f"'{function}'" if function else "reward"
            raise ValueError(f"{file}: no {of} for row {row.id} of domain '{row.domain}' (rewards)")
        return row, rewards
    row = _row(_data(file, overrides), wanted)
    return row, [RewardConfig(function=function or _guess(row))]


def _data(file: Path, overrides: Sequence[str]) -> DataConfig:
    from rollpacker.config import DataConfig, parse_as

    for item in overrides:
        if not item.startswith("data."):
            raise ValueError(
                f"override '{item}': for a file of rows only keys of 'data' can be set, such as "
                "data.input_key=text"
            )
    keys = [item.removeprefix("data.") for item in overrides]
    return parse_as(DataConfig, {"path": str(file)}, str(file), keys)


def _row(config: DataConfig, wanted: str | None) -> Row:
    from rollpacker.data.load import load_leniently

    rows = load_leniently(config)
    if wanted is None:
        return rows[0]
    for each in rows:
        if each.id == wanted:
            return each
    known = ", ".join(str(each.id) for each in rows[:5])
    raise ValueError(f"--row: no row with id '{wanted}' in {config.path}; the first are {known}")


def _with_answer(row: Row, answer: str | None, rewards: Sequence[RewardConfig]) -> Row:
    """The row with another answer, which at least one reward must read."""
    if answer is None:
        return row
    changed = replace(row, answer=answer, columns={**row.columns, "answer": answer})
    if all(each.runs_programs and not _has_tests_in_answer(changed) for each in rewards):
        raise ValueError(
            "--answer: reward 'code' does not use an answer, since it runs the row's tests: leave "
            "it out, and name the row with FILE and --row"
        )
    return changed


def _has_tests_in_answer(row: Row) -> bool:
    from rollpacker.reward.code import row_tests

    try:
        return row_tests(row.columns, remote=True)[0] == "answer"
    except ValueError:
        return False


def _guess(row: Row) -> str:
    from rollpacker.sandbox import read_tests

    try:
        return "code" if read_tests(row.columns) else "math"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "math"


def _check(reward: RewardConfig, text: str, row: Row) -> _Checked:
    name = reward.name or reward.function
    if reward.function == "judge":
        raise ValueError(f"reward '{name}' asks a model, so only a run can try it (--reward)")
    if reward.function == "code":
        score, said = _code(name, reward.options, text, row)
        return _Checked(name, reward.weight, score, said)
    from rollpacker.reward.base import GradingError

    try:
        if reward.function == "math":
            score, said = _math(reward.options, text, row)
        else:
            score, said = _called(reward, text, row)
    except GradingError as error:  # a run counts it as a failed call, but here the row is wrong
        raise ValueError(f"row {row.id}: {error}") from error
    return _Checked(name, reward.weight, score, said)


def _math(options: Mapping[str, Any], text: str, row: Row) -> _Graded:
    from rollpacker.reward.math import MathReward
    from rollpacker.user_code import Parameters

    Parameters("math", MathReward).check_options(options)
    report = MathReward(**options).explain(text, row.columns)
    return report.score, _math_said(report, row.columns.get("answer"))


def _math_said(report: MathReport, gold: Any) -> Mapping[str, Any]:
    found = report.found
    return {
        "extracted": None if found is None else found.answer,
        "found_by": None if found is None else found.rule,
        "read_as": None if report.answer is None else str(report.answer),
        "right": str(gold),
        "right_read_as": " | ".join(map(str, report.golds)),
        "compared": report.why,
    }


def _code(name: str, options: Mapping[str, Any], text: str, row: Row) -> _Graded:
    from rollpacker.reward.code import CodeReward, read_options, row_tests

    try:
        row_tests(row.columns, remote=read_options(options).remote is not None)
    except ValueError as error:
        raise ValueError(
            f"row {row.id}: reward '{name}' cannot read the row's tests: {error}"
        ) from None
    report = CodeReward(options).explain(_request(text, row))
    said: dict[str, Any] = {
        "program": report.program,
        "found_by": report.rule,
        "tests_from": report.column,
        "float_tolerance": report.float_tolerance,
        "level": report.level,
        "tests": [asdict(test) for test in report.tests],
    }
    return report.score, said


def _called(reward: RewardConfig, text: str, row: Row) -> _Graded:
    from rollpacker.reward.base import GradingError, Scored
    from rollpacker.reward.functions import resolve

    scorer = resolve(reward.function, reward.options, columns=row.columns)
    try:
        with _limit(reward):
            (scored,) = scorer([_request(text, row)])
    except GradingError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise GradingError(told(error)) from error
    if not isinstance(scored, Scored):
        return scored, {}
    return scored.score, {**scored.extra, **scored.metrics}


@contextmanager
def _limit(reward: RewardConfig) -> Iterator[None]:
    """A time limit, as a run has for each call."""

    def end(*_: object) -> None:
        raise PlainError(f"timed out after {reward.call_limit_s:g} s (rewards[].timeout_s)")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, reward.call_limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _request(text: str, row: Row) -> GradeRequest:
    from rollpacker.core.types import AttemptId
    from rollpacker.reward.base import GradeRequest

    return GradeRequest(
        attempt=AttemptId(0),
        prompt=row.prompt,
        completion=text,
        completion_ids=[],
        row=row.columns,
        domain=row.domain,
        source=str(row.id),
    )


def _lines(checked: _Checked, *, weighted: bool) -> Iterator[tuple[str, str]]:
    """Printed names and values, with a line for each test and one for each problem in it."""
    yield "reward", checked.reward
    for key, value in checked.said.items():
        if key == "tests":
            for number, test in enumerate(value, 1):
                yield f"test {number}", f"{test['verdict']}, {test['cpu_s']:.3f} s: {test['given']}"
                for part in ("expected", "found", "detail"):
                    if test["verdict"] != "pass" and test[part]:
                        yield "", f"{part} {test[part]}"
        else:
            shown = "-" if value is None else str(value)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
            for place, line in enumerate(shown.rstrip("\n").split("\n")):
                yield "" if place else key, line
    yield "score", _shown(checked.score)
    if weighted:
        yield "weight", f"{checked.weight:g}"


def _shown(score: float | None) -> str:
    return "not applicable" if score is None else f"{score:g}"
