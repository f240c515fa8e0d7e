"""What every command prints with: the terminal, standard error, one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rollpacker.core.codec import dumps_finite, loads
from rollpacker.terminal import Terminal

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE ...]", help="Overrides.")
]
_IN_TRL = "rollpacker"
"""Where a trainer of TRL's has its run, in its ``output_dir``."""
console = Terminal()
errors = Terminal(stderr=True)


def print_json(data: Any) -> None:
    """Print one JSON object; what is not finite becomes null."""
    print(json.dumps(loads(dumps_finite(data))))


def print_found(data: Any, as_json: bool, text: str) -> None:
    """Print ``data`` as one JSON object, or ``text``, which says it in words."""
    if as_json:
        print_json(data)
    else:
        print_plain(text)


def table_of(*columns: str, left: int = 1, title: str | None = None) -> Table:
    """An empty table; all but the ``left`` first columns hold numbers, to the right."""
    view = Table(title=title)
    for place, column in enumerate(columns):
        view.add_column(column, justify="left" if place < left else "right")
    return view


def print_plain(text: str) -> None:
    """Print a line as it is: nothing is markup, highlighted or wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_aside(text: str) -> None:
    """Print a line as it is on standard error."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a note on standard error."""
    print_aside(f"note: {text}")


def run_in(folder: Path) -> Path:
    """A run's folder, where its trainer's is given."""
    inner = folder / _IN_TRL
    there = (inner / "config.yaml").is_file() and not (folder / "config.yaml").is_file()
    return inner if there else folder
