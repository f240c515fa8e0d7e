"""``rollpacker sandbox``: tries and uses the code sandbox."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollpacker.cli.output import Shown, print_note, shown

if TYPE_CHECKING:
    from rollpacker.sandbox import Level, Test, Verdict

sandbox_app = typer.Typer(
    help="Run untrusted programs.", no_args_is_help=True, pretty_exceptions_enable=False
)

LevelOption = Annotated[
    str, typer.Option(help="strong, standard or basic (an error if it does not work here).")
]


@sandbox_app.callback()
def check_system() -> None:
    """Run untrusted programs."""
    if sys.platform != "linux":
        raise ValueError(f"the sandbox needs Linux, this is {sys.platform}")


@sandbox_app.command()
@shown
def selftest(
    level: LevelOption = "standard",
    timeout: Annotated[float, typer.Option(help="CPU seconds of each program.")] = 0.3,
) -> Shown:
    """Run hostile programs on this machine and print how many were contained.

    Example: rollpacker sandbox selftest --level strong
    """
    from rollpacker.sandbox import Limits, Sandbox
    from rollpacker.sandbox.selftest import selftest as run_selftest

    _check_timeout(timeout)
    limits = Limits(memory_mb=256, output_mb=4, idle_s=0.5)
    with Sandbox(_level(level), limits=limits, check=False) as sandbox:
        found = run_selftest(sandbox, timeout)
    for each in found.escaped:
        print_note(f"not contained: {each}")
    text = f"level {found.level}: {found.contained} of {found.total} contained"
    return Shown(asdict(found), [text], code=found.contained < found.total)


@sandbox_app.command()
@shown
def run(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="Python file.")],
    tests: Annotated[
        Path,
        typer.Option(
            help='JSON list of {"stdin","stdout"}, {"call","args","expected"} or {"asserts"}.',
        ),
    ],
    timeout: Annotated[float, typer.Option(help="CPU seconds for each test.")] = 10.0,
    level: LevelOption = "standard",
) -> Shown:
    """Run a program against tests. The exit code is 1 unless all of them pass.

    Example: rollpacker sandbox run solution.py --tests tests.json --timeout 2
    """
    from rollpacker.sandbox import Sandbox

    _check_timeout(timeout)
    parsed = _read_tests(tests)
    source = _read_text(program)
    with Sandbox(_level(level)) as sandbox:
        verdict = sandbox.run(source, parsed, timeout)
    return Shown(asdict(verdict), _in_words(verdict), code=verdict.verdict != "pass")


def _level(name: str) -> Level:
    from rollpacker.sandbox import LEVELS

    for level in LEVELS:
        if level == name:
            return level
    raise ValueError(f"--level: unknown level '{name}': expected {', '.join(LEVELS)}")


def _check_timeout(seconds: float) -> None:
    from rollpacker.sandbox.base import LONGEST_S

    if not 0 < seconds <= LONGEST_S:
        raise ValueError(
            f"--timeout: expected CPU seconds above 0 and at most {LONGEST_S:g}, got {seconds:g}"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def _read_tests(path: Path) -> list[Test]:
    from rollpacker.sandbox import parse_test
    from rollpacker.sandbox.grading.grade import job_of

    text = _read_text(path)
    try:
        rows: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise ValueError(f"{path}: expected a JSON list of test objects")
    found: list[Test] = []
    for place, row in enumerate(rows):
        try:
            found.append(parse_test(row))
            job_of("", found[-1])
        except ValueError as error:
            raise ValueError(f"{path}: test {place}: {error}") from error
    return found


def _in_words(verdict: Verdict) -> Iterator[str]:
    forgeable = ", forgeable" if verdict.forgeable else ""
    yield (
        f"{verdict.verdict}: {verdict.passed} of {len(verdict.tests)} passed, "
        f"{verdict.cpu_s:.3f} CPU s, level {verdict.level}{forgeable}"
    )
    for place, test in enumerate(verdict.tests):
        yield f"  {place}: {test.verdict} {test.cpu_s:.3f} s {test.detail}".rstrip()
