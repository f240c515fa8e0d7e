"""Output of all commands: the terminal, standard error, and JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import RenderableType
from rich.table import Table

from rollpacker.core.codec import dumps_finite, loads
from rollpacker.terminal import Terminal

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE ...]", help="Overrides.")
]
_IN_TRL = "rollpacker"  # folder of a run in the `output_dir` of TRL's trainer
console = Terminal()
errors = Terminal(stderr=True)
T = TypeVar("T")


def print_json(data: Any) -> None:
    """Print one JSON object. Numbers that are not finite become null."""
    print(json.dumps(loads(dumps_finite(data))))


class Note(str):
    """A line for standard error."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """A command's result: an object for ``--json``, or lines and tables for users.

    Args:
        code: the command's exit code.
    """

    data: Any
    lines: Iterable[RenderableType]
    code: int = 0


def shown(command: Callable[..., Shown]) -> Callable[..., None]:
    """Add ``--json`` to a command and print its result."""

    @wraps(command)
    def run(as_json: bool, **given: Any) -> None:
        found = command(**given)
        if as_json:
            print_json(found.data)
        else:
            print_lines(found.lines)
        if found.code:
            raise typer.Exit(found.code)

    own = inspect.signature(command, eval_str=True).parameters.values()
    word = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
    )
    return with_parameters(run, (*own, word))


def with_parameters(
    command: Callable[..., T], parameters: Iterable[inspect.Parameter]
) -> Callable[..., T]:
    """Let typer see these parameters of ``command``."""
    signature = inspect.Signature([*parameters])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    return command


def print_lines(lines: Iterable[RenderableType]) -> None:
    """Print notes on standard error, other texts unchanged, and tables as wide as the terminal."""
    for line in lines:
        if isinstance(line, Note):
            print_note(line)
        elif isinstance(line, str):
            print_plain(line)
        else:
            console.print(line)


def table_of(*columns: str, left: int = 1, title: str | None = None) -> Table:
    """An empty table. All columns except the ``left`` first ones are right-aligned numbers."""
    view = Table(title=title)
    for place, column in enumerate(columns):
        view.add_column(column, justify="left" if place < left else "right")
    return view


def print_plain(text: str) -> None:
    """Print a line unchanged: no markup, highlighting or wrapping."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_aside(text: str) -> None:
    """Print a line unchanged on standard error."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a note on standard error."""
    print_aside(f"note: {text}")


def run_in(folder: Path) -> Path:
    """A run's folder, also if its trainer's folder is given."""
    inner = folder / _IN_TRL
    there = (inner / "config.yaml").is_file() and not (folder / "config.yaml").is_file()
    return inner if there else folder
