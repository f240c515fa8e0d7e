"""The command line: parse, load the configuration, call one function.

Exit codes: 0 success, 1 failure, 2 a mistake of the user (one line on standard error), 128 plus its
number after a signal that stopped a run early.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollpacker import __version__, config
from rollpacker.cli.doctor import doctor
from rollpacker.cli.evaluate import check_here, evaluate
from rollpacker.cli.init import init
from rollpacker.cli.mux.app import mux_app
from rollpacker.cli.output import (
    ConfigFile,
    Json,
    Overrides,
    Shown,
    console,
    errors,
    print_json,
    print_note,
    run_in,
    shown,
    table_of,
)
from rollpacker.cli.rewards import rewards_app
from rollpacker.cli.samples import samples
from rollpacker.cli.sandbox import sandbox_app
from rollpacker.cli.simulate.app import calibrate, estimate, simulate
from rollpacker.cli.simulate.reproduce import reproduce
from rollpacker.cli.trace.app import trace_app
from rollpacker.config.rollout import is_own
from rollpacker.errors import visible
from rollpacker.terminal import drop_no_size

if TYPE_CHECKING:
    from rich.table import Table

    from rollpacker.runtime.step.phase_nodes import PhaseNodes

app = typer.Typer(
    help="Fast synchronous, on-policy RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
journal_app = typer.Typer(help="Work with a run's journal.", no_args_is_help=True)
_TRAIN, _PREDICT, _CLUSTER, _TOOLS = "Train", "Predict", "Cluster", "Tools"
for panel, commands in {
    _TRAIN: (init, doctor, samples, evaluate),
    _PREDICT: (simulate, estimate, calibrate, reproduce),
}.items():
    for command in commands:
        name = "eval" if command is evaluate else None
        app.command(name=name, rich_help_panel=panel)(command)
for name, panel, group in (
    ("trace", _PREDICT, trace_app),
    ("mux", _CLUSTER, mux_app),
    ("rewards", _TOOLS, rewards_app),
    ("sandbox", _TOOLS, sandbox_app),
    ("journal", _TOOLS, journal_app),
):
    app.add_typer(group, name=name, rich_help_panel=panel)


def main() -> None:
    """Entry point of the ``rollpacker`` command."""
    drop_no_size()
    try:
        app()
    except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        _fail(str(error) if isinstance(error, ValueError) else _os_error(error), 2)
    except ImportError as error:
        fix = "" if "pip install" in str(error) else "; pip install 'rollpacker[all]'"
        _fail(f"{error}{fix}", 2)
    except (RuntimeError, OSError) as error:
        _fail(str(error), 1)


def _fail(text: str, code: int) -> None:
    print(f"rollpacker: {visible(text.strip())}", file=sys.stderr)
    raise SystemExit(code)


def _os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Fast synchronous, on-policy RL post-training of language models."""
    if show:
        print(f"rollpacker {__version__}")
        raise typer.Exit


@app.command(rich_help_panel=_TRAIN)
@shown
def demo(
    out: Annotated[Path, typer.Option(help="Folder of runs and report.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A few steps only.")] = False,
) -> Shown:
    """Train a small reasoning model on this machine, in each mode, and write a report.

    Example: rollpacker demo --out runs/demo
    """
    from rollpacker.demo.cluster import TITLE, cluster_table, remarks
    from rollpacker.demo.contention import warning
    from rollpacker.demo.run import DEMO, QUICK, free_folder, run_demo, table

    say: Callable[[str], None] = errors.print
    summary = run_demo(free_folder(out), QUICK if quick else DEMO, say)
    speedup, noise = summary["speedup"], warning(summary["other_load"])
    wall = "too busy for" if noise else f"{speedup['wall']:.2f}x as fast by"
    lines = (
        _table(table(summary), "GRPO on two cores, the same long problems in each mode"),
        f"{summary['recommended_mode']} against off: {speedup['decode_steps']:.2f}x fewer decode "
        f"steps, nothing discarded, {wall} the wall clock",
        *([noise] if noise else ()),
        _table(cluster_table(summary["cluster"]), TITLE),
        *(*remarks(summary["cluster"]), summary["scope"]),
        f"report: {summary['report']}",
    )
    return Shown(summary, lines)


def _table(lines: Sequence[tuple[str, ...]], title: str) -> Table:
    header, *rows = lines
    view = table_of(*header, title=title)
    for row in rows:
        view.add_row(*row)
    return view


def shared_phases(loaded: config.RunConfig) -> PhaseNodes | None:
    """The phases of a job that shares its nodes (None for a job with nodes of its own)."""
    if not loaded.mux.url:
        return None
    from rollpacker.rollmux.service.job.phase_job import JobPhases

    return JobPhases(loaded, say=errors.print)


@app.command(rich_help_panel=_TRAIN)
def train(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="'auto': continue from the newest good checkpoint.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show rounds, bubbles and the times of phases too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run one RL job.

    Example: rollpacker train job.yaml train.learning_rate=2e-6 --resume auto
    """
    if resume not in (None, "auto"):
        raise ValueError(f"--resume {resume}: the only value is 'auto'")
    given = [*(overrides or []), *([f"output={out}"] if out else [])]
    loaded = config.load(path, given)
    check_here(loaded.model.path, loaded.data, loaded.eval and loaded.eval.data)
    from rollpacker.job import Stopped
    from rollpacker.job import train as run
    from rollpacker.runtime.record.progress import Progress

    folder, stopped = Path(loaded.output), None
    try:
        run(
            loaded,
            resume=resume == "auto",
            progress=Progress(verbose=verbose),
            phases=shared_phases(loaded),
        )
    except Stopped as stop:
        stopped = stop
    file = folder / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if as_json:
        print_json(summary)
    elif stopped is None:
        report = folder / "report.html"
        where = f", report: {report}" if report.exists() else ""
        emulated = "EMULATED " if "emulated" in summary else ""
        console.print(f"{summary['steps']} {emulated}steps{where}")
    if stopped is not None:
        raise stopped


@journal_app.command()
@shown
def replay(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A run's folder or journal.jsonl.")],
) -> Shown:
    """Feed a journal through its policy and compare every decision.

    Example: rollpacker journal replay runs/demo/exact/journal.jsonl
    """
    from rollpacker.core import journal
    from rollpacker.policy.rollout import from_journal

    file = run_in(path) / "journal.jsonl" if path.is_dir() else path
    result = journal.replay(file, from_journal)
    count = len(result.differences)
    first = [each for n, each in enumerate(result.differences) if n < 3 or "error" in each]
    data = {"events": result.events, "decisions": result.decisions, "differences": count}
    data |= {"first_differences": first, "unfinished_step": result.unfinished}
    lines = [f"{result.events} events, {result.decisions} decisions, {count} differences"]
    if result.unfinished is not None:
        lines.append(f"the journal ends within step {result.unfinished}")
    if first:
        settings = next(journal.read_all(file))[1]["meta"]["settings"]
        lines += _explained(first, file, settings["rollout"]["tail_batching"]["mode"])
    return Shown(data, lines, code=bool(count))


def _explained(first: list[dict[str, Any]], file: Path, mode: str) -> Iterator[str]:
    """Differences, the last with an ``error`` if it stopped the replay."""
    cause = "was the journal changed, or written by another version of rollpacker?"
    if is_own(mode):
        cause = f"did the rule's file {mode.rpartition(':')[0]} change, or does it use a clock?"
    for each in first:
        place = f"{'' if each['file'] == str(file) else each['file'] + ', '}line {each['line']}"
        if "error" in each:
            yield f"{place}: the replay stopped at an event that cannot follow: {each['error']}"
            return
        if each is first[0]:
            yield f"{place}: the policy decides otherwise than the journal says: {cause}"
        both = next((a, b) for a, b in zip_longest(each["written"], each["replayed"]) if a != b)
        a, b = ("no decision" if one is None else f"{json.dumps(one):.150}" for one in both)
        yield f"{place}: the journal has {a}, the policy makes {b}"


@app.command(rich_help_panel=_TRAIN)
@shown
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> Shown:
    """Write report.html and timeline.json again from a run's files.

    Example: rollpacker report runs/demo/exact
    """
    from rollpacker.report.run_report import write_report
    from rollpacker.report.timeline import write_timeline

    run = run_in(run)
    written = {"report": str(write_report(run, print_note)), "timeline": str(write_timeline(run))}
    return Shown(written, written.values())
