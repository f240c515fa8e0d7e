"""``rollpacker trace``: read, describe, fit, generate and compare workload traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollpacker.cli.output import Note, Shown, shown
from rollpacker.cli.trace import tables
from rollpacker.cli.trace.replay import replay
from rollpacker.cli.trace.tables import (
    at_least,
    chosen_task,
    meant,
    progress_of,
    read,
    read_responses,
    recognised,
)

if TYPE_CHECKING:
    from rollpacker.polytrace.model.workload import WorkloadModel

trace_app = typer.Typer(
    help="Work with workload traces.", no_args_is_help=True, pretty_exceptions_enable=False
)
trace_app.command()(replay)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A trace: a file, a folder, or a folder with a folder per task.",
    ),
]
Format = Annotated[str | None, typer.Option(help="Format of PATH (default: detected).")]
Task = Annotated[str | None, typer.Option(help="Name of the task (default: the folder's).")]


@trace_app.command("import")
@shown
def import_(
    path: Source,
    out: Annotated[Path, typer.Option(help="Native trace to write, a parquet file.")],
    format: Format = None,
    task: Task = None,
) -> Shown:
    """Read a trace, or the logs of a run or trainer, into one native file.

    Example: rollpacker trace import runs/demo/off --out demo.parquet
    """
    from rollpacker.polytrace import formats

    notes: list[str] = []
    trace = read(path, format, task, notes)
    formats.write(trace, out, "native")
    tasks = tables.tasks_of(trace)
    data = {"file": str(out), "tasks": tasks, "notes": notes}
    return Shown(data, [tables.imported(tasks), *map(Note, notes), f"trace: {out}"])


@trace_app.command()
@shown
def export(
    path: Source,
    to: Annotated[
        str,
        typer.Option(
            help="polytrace, packed_lengths, multiturn, reward_timings, dapo_filter or native.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the files (a file if native).")],
    format: Format = None,
    task: Task = None,
) -> Shown:
    """Write a trace in a format of the PolyTrace suite.

    Example: rollpacker trace export demo.parquet --to polytrace --out demo-trace
    """
    from rollpacker.polytrace import formats

    notes: list[str] = []
    trace = read(path, format, task, notes)
    files = [str(file) for file in formats.write(trace, out, to, note=notes.append)]
    return Shown({"files": files, "notes": notes}, [*map(Note, notes), *files])


@trace_app.command()
@shown
def validate(path: Source, format: Format = None) -> Shown:
    """List the errors of a trace, with file and line. The exit code is 1 if there are any.

    A path without any trace is a mistake of the user: exit code 2.

    Example: rollpacker trace validate traces/verl_dapo_32b
    """
    from rollpacker.polytrace.formats import detect, problems

    detect.sources(path, format)
    with progress_of(path) as tick:
        found = problems(path, format=format, tick=tick)
    rows = [{"file": str(each.file), "line": each.line, "text": each.text} for each in found]
    return Shown({"problems": rows}, map(str, found or ["no problems"]), code=bool(found))


@trace_app.command()
@shown
def characterize(
    path: Source,
    html: Annotated[Path | None, typer.Option(help="Page of plots to write.")] = None,
    workers: Annotated[int, typer.Option(help="Engines of the rollout.")] = 8,
    slots: Annotated[int, typer.Option(help="Sequences an engine decodes at once.")] = 256,
    format: Format = None,
    task: Task = None,
) -> Shown:
    """Describe a workload: lengths, correlation, drift, waiting.

    For the gain of tail batching on it: rollpacker estimate --from PATH.

    Example: rollpacker trace characterize demo.parquet --html demo.html
    """
    from rollpacker.polytrace.describe import Layout, sentences
    from rollpacker.polytrace.describe import characterize as describe

    layout = Layout(workers=workers, slots=slots)
    write_page = None if html is None else _page_writer()
    notes: list[str] = []
    trace = read_responses(path, format, task, notes)
    reports = describe(trace, layout)
    read_as = recognised(path, format)
    if html is not None and write_page is not None:
        write_page(trace, reports, html, layout)
    said = {name: sentences(report) for name, report in reports.items()}
    tasks = {name: asdict(each) | {"sentences": said[name]} for name, each in reports.items()}
    page = {"html": str(html)} if html is not None else {}
    lines = [f"read as: {', '.join(read_as)}", tables.described(reports)]
    for name, those in said.items():
        lines += [f"\n{name}", *(f"- {sentence}" for sentence in those)]
    lines += map(Note, notes)
    lines += [f"\nfor the gain of tail batching on it: rollpacker estimate --from {path}"]
    lines += [f"\npage: {html}"] if page else []
    return Shown({"tasks": tasks, "read_as": read_as, "notes": notes, **page}, lines)


@trace_app.command()
@shown
def fit(
    path: Source,
    out: Annotated[Path, typer.Option(help="Model to write, a JSON file.")],
    task: Annotated[str | None, typer.Option(help="Task to fit, if the trace has several.")] = None,
    format: Format = None,
) -> Shown:
    """Fit a model to one task of a trace and print how well it reproduces it.

    Example: rollpacker trace fit demo.parquet --out demo.json
    """
    from rollpacker.polytrace.model import fit as fitting
    from rollpacker.polytrace.model.workload import save_model

    notes: list[str] = []
    trace = read_responses(path, format, None, notes)
    name = chosen_task(path, trace.tasks, task)
    found = fitting.fit(trace.only(name))[name]
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(found.model, out)
    data = {"file": str(out), "task": name, "goodness": asdict(found.goodness), "notes": notes}
    file = f"model of {name}, {found.model.source}: {out}"
    return Shown(data, [tables.goodness(found.goodness), *map(Note, notes), file])


@trace_app.command()
@shown
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A name of `trace models`, or a fitted file.")
    ],
    out: Annotated[Path, typer.Option(help="Native file, or folder in other formats.")],
    steps: Annotated[int, typer.Option(help="Steps.")],
    prompts: Annotated[
        int | None, typer.Option(help="Prompts per step (default: the model's).")
    ] = None,
    responses: Annotated[
        int | None, typer.Option(help="Responses per prompt (default: the model's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    format: Annotated[str, typer.Option(help="Format to write: native, polytrace, ...")] = "native",
) -> Shown:
    """Write a synthetic workload.

    Example: rollpacker trace generate math --steps 20 --out math.parquet
    """
    from rollpacker.polytrace import formats
    from rollpacker.polytrace.model.workload import generate as make

    at_least(1, steps=steps, prompts=prompts, responses=responses)
    at_least(0, seed=seed)
    notes: list[str] = []
    trace = make(_model(model), steps=steps, prompts=prompts, responses=responses, seed=seed)
    files = [str(file) for file in formats.write(trace, out, format, note=notes.append)]
    tasks = tables.tasks_of(trace)
    said = (
        f"{name}: {row['responses']} responses of {row['prompts']} prompts over {row['steps']}"
        f" steps, mean {row['mean']:.0f} tokens, longest {row['max']}"
        for name, row in tasks.items()
    )
    data = {"files": files, "tasks": tasks, "notes": notes}
    return Shown(data, [*map(Note, notes), *said, *files])


@trace_app.command()
@shown
def models() -> Shown:
    """List the models that ship with rollpacker.

    Example: rollpacker trace models
    """
    from rollpacker.polytrace.model.workload import load_model, model_names

    shipped = {name: load_model(name) for name in model_names()}
    rows = [
        {
            "name": name,
            "prompts": model.prompts,
            "responses": model.responses,
            "cap": model.lengths.cap,
            "tools": model.turns is not None,
            "rewards": model.rewards is not None,
            "source": model.source,
        }
        for name, model in shipped.items()
    ]
    return Shown({"models": rows}, [tables.shipped(shipped)])


@trace_app.command()
@shown
def compare(
    predicted: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="Predicted: a run folder, metrics.jsonl, or JSON of step_s lists."
        ),
    ],
    measured: Annotated[Path, typer.Argument(metavar="B", help="Measured: same forms.")],
) -> Shown:
    """Compare predicted with measured seconds, step by step and phase by phase.

    Accuracy is 1 - |predicted - measured| / measured.

    Example: rollpacker trace compare simulated.json runs/demo/off
    """
    from rollpacker.polytrace import compare as comparing

    sides = [comparing.read_timed(path) for path in (predicted, measured)]
    found = comparing.compare(*sides)
    notes = [
        Note(f"only {here.source} has {', '.join(alone)}: not compared")
        for here, there in (sides, sides[::-1])
        if (alone := sorted(set(here.phases) - set(there.phases)))
    ]
    if found.instant:
        how = "measured as 0 s in a step but predicted otherwise, so not compared"
        notes.append(Note(f"{', '.join(found.instant)}: {how}"))
    whole = f"{len(found.steps)} steps, accuracy of their total {found.total:.1%}"
    return Shown(asdict(found), [tables.compared(found), *notes, whole])


def _page_writer() -> Callable[..., Path]:
    """The function that writes the page. Raises ``ValueError`` if the extra is not installed."""
    try:
        from rollpacker.report.trace_report import write_trace_report
    except ImportError as error:
        raise ValueError(f"--html: {error}") from None
    return write_trace_report


def _model(name: str) -> WorkloadModel:
    from rollpacker.polytrace.model.workload import load_model, model_names

    names = model_names()
    if name not in names and not Path(name).is_file():
        raise ValueError(
            f"no workload model {name!r}{meant(name, names)}: give a file or one of"
            f" {', '.join(names)}"
        )
    try:
        return load_model(name)
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a workload model, expected JSON of `trace fit`") from None
