"""``rollpacker trace``: import, export and check workload traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rollpacker.polytrace.schema import Trace

trace_app = typer.Typer(
    help="Work with workload traces.", no_args_is_help=True, pretty_exceptions_enable=False
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A trace: a file, a folder, or a folder of folders, one a task.",
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help="Format of PATH; found out by default.")
]
Task = Annotated[str | None, typer.Option("--task", help="Name of the task; default: the folder's")]
console = Console()
errors = Console(stderr=True)


@trace_app.command("import")
def import_(
    path: Source,
    out: Annotated[Path, typer.Option("--out", help="Native trace to write, a parquet file.")],
    format: Format = None,
    task: Task = None,
    as_json: Json = False,
) -> None:
    """Read a trace or the logs of a run, of TRL or of verl into one native file.

    Example: rollpacker trace import runs/demo/off --out demo.parquet
    """
    from rollpacker.polytrace import formats

    notes: list[str] = []
    trace = formats.read(path, format=format, task=task, note=notes.append)
    formats.write(trace, out, "native")
    tasks = _tasks(trace)
    if as_json:
        console_json({"file": str(out), "tasks": tasks, "notes": notes})
        return
    view = Table()
    for place, column in enumerate(("task", "responses", "prompts", "steps", "mean tokens", "max")):
        view.add_column(column, justify="right" if place else "left")
    for name, row in tasks.items():
        mean = "" if row["mean"] is None else f"{row['mean']:.0f}"
        longest = "" if row["max"] is None else str(row["max"])
        counts = (str(row["responses"]), str(row["prompts"]), str(row["steps"]))
        view.add_row(name, *counts, mean, longest)
    console.print(view)
    _tell(notes)
    console.print(f"trace: {out}", highlight=False, markup=False, soft_wrap=True)


@trace_app.command()
def export(
    path: Source,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="polytrace, packed_lengths, multiturn, reward_timings, dapo_filter or native.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the files; a file if native.")],
    format: Format = None,
    task: Task = None,
    as_json: Json = False,
) -> None:
    """Write a trace in a format of the PolyTrace suite.

    Example: rollpacker trace export demo.parquet --to polytrace --out demo-trace
    """
    from rollpacker.polytrace import formats

    notes: list[str] = []
    trace = formats.read(path, format=format, task=task, note=notes.append)
    files = formats.write(trace, out, to, note=notes.append)
    if as_json:
        console_json({"files": [str(file) for file in files], "notes": notes})
        return
    _tell(notes)
    for file in files:
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)


@trace_app.command()
def validate(path: Source, format: Format = None, as_json: Json = False) -> None:
    """List what is wrong with a trace, with file and line; exit 1 if anything is.

    A path that holds no trace at all is a mistake: exit 2.

    Example: rollpacker trace validate traces/verl_dapo_32b
    """
    from rollpacker.polytrace.formats import detect
    from rollpacker.polytrace.formats.validate import problems

    detect.sources(path, format)
    found = problems(path, format=format)
    if as_json:
        rows = [{"file": str(each.file), "line": each.line, "text": each.text} for each in found]
        console_json({"problems": rows})
    elif found:
        for each in found:
            console.print(str(each), highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("no problems")
    if found:
        raise typer.Exit(1)


def console_json(data: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(data))


def _tell(notes: list[str]) -> None:
    for line in notes:
        errors.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)


def _tasks(trace: Trace) -> dict[str, dict[str, Any]]:
    import polars as pl

    tokens = pl.col("response_tokens")
    table = trace.samples.group_by("task", maintain_order=True).agg(
        pl.len().alias("responses"),
        pl.col("prompt").n_unique().alias("prompts"),
        pl.col("step").n_unique().alias("steps"),
        tokens.mean().alias("mean"),
        tokens.max().alias("max"),
    )
    return {row.pop("task"): row for row in table.iter_rows(named=True)}
