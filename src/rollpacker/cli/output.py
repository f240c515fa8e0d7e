"""What every command prints with: the terminal, standard error, one JSON object."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from rollpacker.core.finite import finite

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
console = Console()
errors = Console(stderr=True)


def print_json(data: Any) -> None:
    """Print one JSON object; what is not finite becomes null."""
    print(json.dumps(finite(data), allow_nan=False))


def print_plain(text: str) -> None:
    """Print a line as it is: nothing is markup, highlighted or wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a note on standard error."""
    errors.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
